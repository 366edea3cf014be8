// What Python passes in. Python makes its structs of this text (kernels/abi.py). A struct starts as zeros,
// and its fields are set by name: {a, b, c} does not compile, so a field that is put between others shifts no value.

#pragma once

#include <cstdint>
#include <cstring>

#define PL_STRUCT(name, ...)                         \
  struct name {                                      \
    __VA_ARGS__                                      \
    name() { memset((void*)this, 0, sizeof *this); } \
  };

extern "C" {

// y = x W^T * scale + bias
PL_STRUCT(Linear,
  const void* weight;  // packed
  const float* scale;  // [n], int8 only
  const float* bias;   // [n] or null
  const int32_t* order;  // [k] in blocks: which input comes first, second, ..; or null: they are in order
  int64_t n, k;        // outputs, inputs
  int64_t kind;        // Kind
)

PL_STRUCT(Layer,
  Linear qkv, out, up, down;  // up holds gate, then up
  const float* attention_norm;  // or null: none
  const float* mlp_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  int64_t window;       // 0: every earlier key is visible
  const float* attention_post_norm;  // of what attention and MLP add; both or neither
  const float* mlp_post_norm;
  int64_t rope;         // which of the pass's rotation tables; -1: queries and keys stay as they are
)

// processes that compute a part of every product each (ranks.h)
PL_STRUCT(Ranks,
  int64_t rank, count;
  int64_t by_outputs;    // 1: all products are divided by their outputs, so that no sum crosses ranks; else `out` and
                         // `down` are by their inputs
  void* memory;          // shared
  int64_t capacity;      // bytes of a buffer in it
  const int64_t* lives;  // [num_lives] file descriptors, each readable once the process of another rank has ended
  int64_t num_lives;
  int64_t spin_us, timeout_us;  // of a wait: before it sleeps, and before it is given up
  int64_t joins;                // pieces that were joined so far
  int64_t collectives, bytes;   // joins of any size, and what this rank gave in them
)

PL_STRUCT(Model,
  int64_t d_model, heads, kv_heads;
  int64_t head_dim, own_head_dim;  // a multiple of LANES, zero behind the model's own
  int64_t d_ff;                    // likewise
  int64_t rotated;
  int64_t tokens;            // that rows may be of
  int64_t vocab;             // outputs of the head
  const int64_t* of_output;  // [vocab, padded to 16] the token of each output; null: output i is token i
  int64_t wide_activations;  // 1: float32 activations and cache, 0: bf16
  float eps, scale;
  Layer* layers;
  const float* norm;  // or null: states are normed already
  Linear head;
  int64_t activation;  // Activation
  Ranks* ranks;        // of which this is one: heads, d_ff and vocab are its own; null: it is alone
)

// rows of one sequence; see model/attention/base.py
PL_STRUCT(Segment,
  int64_t start, stop;
  int64_t prefix, num_keys;
  int64_t base;                    // slot of key 0 where slots are contiguous, else -1
  const int64_t* keys;             // [num_keys] slots where they are not
  const uint8_t* visible;          // [rows, num_keys - prefix] or null: a chain
  const int64_t* block_positions;  // [num_keys - prefix] or null: prefix, prefix + 1, ..
)

// Beside a Linear: y += up (down x); the factor alpha / rank is in the weights of `up`, and for int8 outputs the
// inverse of their scale.
PL_STRUCT(LowRank,
  Linear down;  // [rank, inputs]; no weight: that Linear has no adapter
  Linear up;    // [outputs, rank]
)

// rows with adapters; ranges are in order and disjoint
PL_STRUCT(AdapterRange,
  int64_t start, stop;
  int64_t rank;
  const LowRank* adapter;  // [layers][qkv, out, up, down]
)

// lossless streams that start as M + P_j; see papers/streaming/model.py
PL_STRUCT(StreamSet,
  int64_t gamma;
  int64_t insertion;         // the first layer that they go through
  const void* embeddings;    // P [gamma, d_model]
  const LowRank* adapter;    // [layers][qkv, out, up, down] of stream rows, or null
  int64_t rank;
)

PL_STRUCT(Pass,
  int64_t rows;
  const void* hidden_in;  // [rows, d_model]
  void* hidden_out;       // [rows, d_model]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], -1: K and V are not kept
  int64_t slot_base;         // where slots is null: first of the contiguous ones
  const float* cos;          // [tables, positions, rotated / 2]; see `Layer.rope`
  const float* sin;
  int64_t num_positions;     // rows of each table
  void* const* k_cache;      // [layers] of [kv_heads, slots, head_dim]
  void* const* v_cache;
  int64_t head_stride;       // elements between two heads of a cache: slots * head_dim
  int64_t packed;            // 1: a row of a cache is bytes and their scale (attention/packed.h), and so are its elements
  const Segment* segments;
  int64_t num_segments;
  int64_t threads;
  int64_t layers;            // of the whole model
  const AdapterRange* adapters;
  int64_t num_adapters;
)

// states that are copied out of a pass
PL_STRUCT(Taps,
  int64_t layers;
  const int64_t* after;  // [layers] so many layers have been run then; ascending
  int64_t rows;
  const int64_t* which;  // [rows] of the pass, or null: the first ones
  void* out;             // [layers, rows, d_model]
  double ms;             // out: how long copying took
)

// how a row of a state drafter is made of a state and a token's embedding
PL_STRUCT(Fuse,
  Linear both;           // [d_model, 2 d_model] of [token, state]
  Linear state;          // [d_model, d_model] of a state without a token; n = 0: there is always one
  const void* constant;  // [d_model] activations: added to a state without a token
  const float* norm;     // of the target's states, which come raw; null: none
  double eps;
)

// the bias of token t's children is table factors_t (Lyanna, section 5.1)
PL_STRUCT(TokenInfo,
  Linear table;          // [vocab, rank]
  const void* factors;   // [vocab, rank] activations
)

// Medusa's: x_j = x + SiLU(W_j x + b_j), of a state x behind the final norm
PL_STRUCT(Heads,
  int64_t count;
  Linear blocks;         // [count * d_model, d_model], one below the other, with their biases
  const Linear* own;     // [count] output heads, or null: the model's serves all
)

// how a sequence chooses from a row of logits: core/sampling.py, `SequenceSampler.rules`
PL_STRUCT(Rules,
  uint64_t key;        // of seed, sample and purpose; a kernel mixes the position in
  double temperature;  // 0: the likeliest token; below 0: by rules that are not known here
  int64_t top_k;       // 0: all
  double top_p;        // 1: all
  double min_p;        // its natural logarithm; above 0: all
)

// the last tokens of a text and its first ones, the sinks, whose keys stand in front of the window
PL_STRUCT(SparseView,
  int64_t sinks, window;   // the row's own among the latter; what lies between is the gap
  const float* cos;        // [gaps, rotated / 2] by which the sinks' keys are turned on
  const float* sin;
  int64_t num_gaps;        // rows of that table
)

// one sequence's draft: its pending tokens, then a token a step
PL_STRUCT(Chain,
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
)

// one sequence's draft tree, which grows a level a pass; node 0 is the root, node n is entry n - 1
PL_STRUCT(TreeStart,
  const int64_t* pending;  // tokens whose K and V are still to be computed, one or more; the last one is the root
  int64_t num_pending;
  int64_t position;        // of the first of them
  int64_t room;            // nodes that may be expanded
  int64_t base;            // as in Segment; slots of the pending tokens and the expanded nodes
  const int64_t* keys;
  int64_t budget;          // drafted nodes of a static tree
  int64_t max_depth;       // levels
  const Rules* rules;      // as of a Chain
  int64_t shift;           // what a token's position in its text is beyond that of its row
  int64_t most;            // nodes that fit into what comes out
  const char* states;      // [num_pending, d_model] of the target in front of the pending tokens, where rows are fused
  int64_t nodes;           // out, like all that follows
  int64_t forwarded;       // the first so many nodes have K and V
  int64_t passes;
  int64_t* tokens;         // [most]
  int64_t* parents;        // [most]
  double* scores;          // [most] cumulative log-probability
)

// how trees grow: `DraftModelConfig`
PL_STRUCT(TreeRules,
  int64_t topk;            // of a dynamic tree children of a node, and nodes expanded a level; 1: a static tree
  int64_t levels;
  const int64_t* factors;  // [levels] children a level of a static tree
  double floor;            // no node below this score is expanded
)

// a tree of Lyanna's Algorithm 1
PL_STRUCT(SampledTree,
  int64_t levels;          // 0: there is none
  const float* logits;     // [levels, vocab]
  int64_t most;            // nodes that come out, the best
  int64_t nodes;           // out, like all that follows; node 0 is the root, node n is entry n - 1
  int64_t* tokens;         // [most]
  int64_t* parents;        // [most]
  double* scores;          // [most] cumulative log q
)

// one sequence's drafts: a new one, one of logits that the last one left over, or both
PL_STRUCT(SampleStart,
  const int64_t* pending;  // tokens behind the states that have no K and V yet, the root last
  int64_t num_pending;
  int64_t position;        // of the first of them
  int64_t base;            // as of a Chain
  const int64_t* keys;
  int64_t root;
  int64_t place;           // position that the root's children will have in the text
  const Rules* rules;      // as of a Chain
  const char* states;      // [num_pending, d_model] of the target in front of the pending tokens
  SampledTree fresh;       // of the new draft, whose logits are made in the call; its levels are passes
  SampledTree left;        // of the logits left over
)

// of kv/ring.py: K and V of a text's first positions, the sinks, and of its last ones
PL_STRUCT(RingShape,
  int64_t sinks, window;
  int64_t span;            // slots of a ring beside the sinks
)

// a chain whose rows see what is in a ring (SPIRe, 3.3)
PL_STRUCT(RingChain,
  int64_t root, position;  // a token, and where it stands
  int64_t steps;           // tokens wanted, one or more
  int64_t ring;
  int64_t start;           // beside the sinks K and V are there from this position on
  const Rules* rules;      // as of a Chain
  int64_t* tokens;         // [steps] out
  float* log_q;            // [steps] out
  int64_t made;            // out: tokens written
)

// rows of one sequence in a pass from token ids on; they are the last of its keys
PL_STRUCT(Span,
  int64_t start, stop;
  int64_t prefix;          // keys in front of its rows
  int64_t base;            // as in Segment, of all its keys
  const int64_t* keys;
  int64_t drafted;         // nodes of a tree, which are its last rows; the row before them is the root. -1: a chain
  const int64_t* parents;  // [drafted], the root is 0
)

// a pass from token ids on, and a choice after each row that is wanted
PL_STRUCT(TokenPass,
  int64_t rows;
  const int64_t* tokens;     // [rows]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows] where K and V go, or null: from slot_base on
  int64_t slot_base;
  const Span* spans;         // in order
  int64_t num_spans;
  const int64_t* wanted;     // rows, ascending
  int64_t num_wanted;
  const Rules* rules;        // [num_spans] or null: all take the likeliest
  float* logits;             // [wanted and riders' rows, vocab] to be filled, or null
  const uint32_t* masks;     // [num_wanted, (vocab + 31) / 32] bits of the tokens that may follow, or null; beside rules
  int64_t* chosen;           // [num_wanted] out, -1 where compiled code cannot choose
)

// a sequence whose next draft is read from streams
PL_STRUCT(Carrier,
  int64_t segment;         // its span
  int64_t root;            // its root's row
  int64_t streams;         // how many streams of its last accepted node are wanted, from the first on
  int64_t most;            // accepted nodes behind which a draft is of use
  const int64_t* ends;     // tokens that end the answer
  int64_t num_ends;
  const int64_t* riders;   // nodes whose streams go with the main rows, ascending
  int64_t num_riders;
  int64_t found;           // out: streams that gave tokens; 0: the draft is of no use, or the caller has to choose
  int64_t rode;            // out: 1 where the streams were rows of the pass itself
  int64_t* tokens;         // [gamma, k] out
  float* log_q;            // [gamma, k] out
)

// the streams of a pass
PL_STRUCT(StreamPass,
  const StreamSet* set;
  Carrier* carriers;       // in the order of their spans
  int64_t count;
  int64_t k;               // tokens wanted of each stream
  int64_t scratch, room;   // slots for K and V of streams: the first one, and how many
  int64_t noisy;           // 1 where drafts are drawn with the noise of the target's own choices
  int64_t late_us;         // out: microseconds that streams took behind the pass
)

}  // extern "C"
