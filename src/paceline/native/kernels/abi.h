// What Python passes in: every struct here has its twin in native/__init__.py.

#pragma once

extern "C" {

struct Linear {        // y = x W^T * scale + bias
  const void* weight;  // packed
  const float* scale;  // [n], int8 only
  const float* bias;   // [n] or null
  int64_t n, k;        // outputs, inputs
  int64_t kind;        // Kind
};

struct Layer {
  Linear qkv, out, up, down;  // up holds gate, then up
  const float* attention_norm;  // or null: none
  const float* mlp_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  int64_t window;       // 0: every earlier key is visible
};

struct Model {
  int64_t d_model, heads, kv_heads;
  int64_t head_dim, own_head_dim;  // a multiple of LANES, zero behind the model's own
  int64_t d_ff;                    // likewise
  int64_t rotated, vocab;
  int64_t wide_activations;  // 1: float32 activations and cache, 0: bf16
  float eps, scale;
  Layer* layers;
  const float* norm;  // or null: states are normed already
  Linear head;
};

struct Segment {        // rows of one sequence; see attention/base.py
  int64_t start, stop;
  int64_t prefix, num_keys;
  int64_t base;                    // slot of key 0 where slots are contiguous, else -1
  const int64_t* keys;             // [num_keys] slots where they are not
  const uint8_t* visible;          // [rows, num_keys - prefix] or null: a chain
  const int64_t* block_positions;  // [num_keys - prefix] or null: prefix, prefix + 1, ..
};

struct LowRank {  // beside a Linear: y += up (down x); the factor alpha / rank is in the weights of `up`, and for
  Linear down;    // int8 outputs the inverse of their scale. [rank, inputs]; no weight: that Linear has no adapter
  Linear up;      // [outputs, rank]
};

struct AdapterRange {      // rows with adapters; ranges are in order and disjoint
  int64_t start, stop;
  int64_t rank;
  const LowRank* adapter;  // [layers][qkv, out, up, down, mlp]; mlp: rows go through it in place of the MLP
};

struct StreamSet {         // lossless streams that start as f(M) + P_j, f the identity; see network/streams.py
  int64_t gamma;
  int64_t insertion;         // the first layer that they go through
  const void* embeddings;    // P [gamma, d_model]
  const LowRank* adapter;    // [layers][qkv, out, up, down, mlp] of stream rows, or null
  int64_t rank;
};

struct Limit {  // streams of one main row that attend to few of the keys that it sees; see network/stream_rows.py
  int64_t row;           // the main row
  int64_t start, stop;   // rows of its streams; their segment begins with the keys of the main row's
  int64_t keys;          // so many of those may be chosen: all but streams'
  int64_t most;          // that are, the main row's own among them
};

struct Pass {
  int64_t rows;
  const void* hidden_in;  // [rows, d_model]
  void* hidden_out;       // [rows, d_model]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], -1: K and V are not kept
  int64_t slot_base;         // where slots is null: first of the contiguous ones
  const float* cos;          // [positions, rotated / 2]
  const float* sin;
  int64_t num_positions;     // rows of that table
  void* const* k_cache;      // [layers] of [kv_heads, slots, head_dim]
  void* const* v_cache;
  int64_t head_stride;       // elements between two heads of a cache: slots * head_dim
  const Segment* segments;
  int64_t num_segments;
  int64_t threads;
  int64_t layers;            // of the whole model
  const AdapterRange* adapters;
  int64_t num_adapters;
  const Limit* limits;       // by their streams' rows, ascending; a segment of such rows holds no others
  int64_t num_limits;
};

struct Taps {            // states that are copied out of a pass
  int64_t layers;
  const int64_t* after;  // [layers] so many layers have been run then; ascending
  int64_t rows;
  const int64_t* which;  // [rows] of the pass, or null: the first ones
  void* out;             // [layers, rows, d_model]
  double ms;             // out: that copying took
};

struct Fuse {            // how a row of a state drafter is made of a state and a token's embedding
  Linear both;           // [d_model, 2 d_model] of [token, state], or [d_model, d_model] of their sum
  Linear state;          // [d_model, d_model] of a state without a token; n = 0: there is always one
  const void* constant;  // [d_model] activations, what the latter adds
  int64_t sum;
  const float* norm;     // of the target's states, which come raw; null: none
  double eps;
};

struct TokenInfo {       // the bias of token t's children is table factors_t (Lyanna, section 5.1)
  Linear table;          // [vocab, rank]
  const void* factors;   // [vocab, rank] activations
};

struct Heads {           // Medusa's: x_j = x + SiLU(W_j x + b_j), of a state x behind the final norm
  int64_t count;
  Linear blocks;         // [count * d_model, d_model], one below the other, with their biases
  const Linear* own;     // [count] output heads, or null: the model's serves all
};

struct Rules;

struct SparseView {  // the last tokens of a text and its first ones, the sinks, whose keys stand in front of the window
  int64_t sinks, window;   // the row's own among the latter; what lies between is the gap
  const float* cos;        // [gaps, rotated / 2] by which the sinks' keys are turned on
  const float* sin;
  int64_t num_gaps;        // rows of that table
};

struct Chain {             // one sequence's draft: its pending tokens, then a token a step
  const int64_t* pending;  // tokens whose K and V are still to be computed; one or more
  int64_t num_pending;
  int64_t position;        // of the first of them
  int64_t steps;           // tokens wanted, one or more
  int64_t base;            // as in Segment; slots of every position up to the last but one token's
  const int64_t* keys;
  float floor;             // a chain ends once its cumulative log-probability is below this
  int64_t* tokens;         // [steps] out
  float* log_q;            // [steps] out, of each token alone
  int64_t made;            // out: tokens written, each the fruit of one pass
  const Rules* rules;      // tokens are drawn as the sequence will draw its own; null: the likeliest ones
  const SparseView* view;  // what each row sees of the text; null: all. With one pending token
  int64_t scratch;         // first of the slots for the view's sinks
};

struct Rules {         // how a sequence chooses from a row of logits: core/sampling.py, `SequenceSampler.rules`
  uint64_t key;        // of seed, sample and purpose; the position is still to be mixed in
  double temperature;  // 0: the likeliest token; below 0: by rules that are not known here
  int64_t top_k;       // 0: all
  double top_p;        // 1: all
  double min_p;        // its natural logarithm; above 0: all
};

}  // extern "C"
