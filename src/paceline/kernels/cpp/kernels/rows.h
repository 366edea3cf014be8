// Rows that are moved.

#pragma once

extern "C" {

// Row which[i] of a table [rows, bytes] goes to place i of `out`. Returns a `Refusal`.
int pl_pick_rows(const char* table, int64_t rows, int64_t bytes, const int64_t* which, int64_t count, char* out) {
  if (count < 0 || !all_within(which, count, 0, rows)) return BAD_COUNT;
  for (int64_t i = 0; i < count; i++) std::memcpy(out + i * bytes, table + which[i] * bytes, bytes);
  return DONE;
}

// Rows of every plane of a cache [planes, slots, bytes] are copied to other places; all of a plane are read before one
// is written. moves [2, count]: slots that are read, slots that are written. Returns a `Refusal`.
int pl_copy_rows(char* cache, int64_t planes, int64_t slots, int64_t bytes, const int64_t* moves, int64_t count) {
  if (count < 0) return BAD_COUNT;
  for (int64_t i = 0; i < 2 * count; i++)
    if (moves[i] < 0 || moves[i] >= slots) return BAD_SLOT;
  static thread_local std::vector<char> held;
  grow(held, count * bytes);
  for (int64_t p = 0; p < planes; p++, cache += slots * bytes) {
    for (int64_t i = 0; i < count; i++) std::memcpy(held.data() + i * bytes, cache + moves[i] * bytes, bytes);
    for (int64_t i = 0; i < count; i++) std::memcpy(cache + moves[count + i] * bytes, held.data() + i * bytes, bytes);
  }
  return DONE;
}

}  // extern "C"
