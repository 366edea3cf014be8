// The layers and the head, run by the threads of a team.

#pragma once

namespace {

template <class A> bool run(const Model& m, const Pass& p, int start, int stop, Part part, int64_t apart) {
  Runner<A> runner(m, p, start, stop, part, apart);
  // The last row of attended beyond heads * head_dim, if any, must read as zero.
  if (runner.attended_width != runner.gathers * m.heads * m.head_dim)
    std::memset((void*)runner.attended, 0, runner.padded_rows * runner.attended_width * sizeof(A));
  team().run(runner.width, runner);
  return runner.well;
}

// Layers start .. stop - 1 in the model's type of activations. False: another rank was lost.
bool run_layers(const Model& m, const Pass& p, int start, int stop, Part part = WHOLE, int64_t apart = 0) {
  if (m.wide_activations) return run<float>(m, p, start, stop, part, apart);
  return run<bf16>(m, p, start, stop, part, apart);
}

// Logits of `rows` states.
void head(const Model& m, const void* hidden, int64_t rows, float* logits, int threads) {
  const int64_t k = m.d_model, stride = up(k, K_STEP);
  if (m.wide_activations)
    linear(m.head, prepared((const float*)hidden, rows, k, m.norm, m.eps), stride, rows, logits, threads);
  else linear(m.head, prepared((const bf16*)hidden, rows, k, m.norm, m.eps), stride, rows, logits, threads);
}

thread_local std::vector<float> t_logits;

}  // namespace

extern "C" {

// Layers start .. stop - 1. Returns a `Refusal`.
int pl_run_layers(const Model* m, const Pass* p, int start, int stop) {
  if (p->rows == 0 || start >= stop) return DONE;
  const Refusal found = check_pass(*m, *p, start, stop);
  if (found != DONE) return found;
  return run_layers(*m, *p, start, stop) ? DONE : LOST;
}

// logits [rows, vocab] float32 of hidden [rows, d_model]. Returns a `Refusal`.
int pl_logits(const Model* m, const void* hidden, int64_t rows, float* logits, int threads) {
  if (rows < 0 || threads < 1) return BAD_COUNT;
  head(*m, hidden, rows, logits, threads);
  return DONE;
}

}  // extern "C"
