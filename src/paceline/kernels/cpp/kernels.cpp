// A decoder's layers on a CPU, for any number of rows: one call a pass, no work per operation.
//
// What decides the time of a small pass is how fast the weights stream from memory and how little happens
// between two of them. So the weights lie in the order in which they are read, a layer is five stages that
// threads meet behind, and everything between two products is done on the block that is still in
// registers or in the first-level cache.
//
// Same bits at every width. A row's result depends on that row alone: every product sums over k in one fixed
// order whatever the number of rows, attention sums over the row's own visible keys in their logical order,
// one after the other. Plain decoding, a chunk of a prompt and a tree of drafts give a row the same bits.
//
// Weights are stored by blocks of 16 outputs: [outputs / 16][k / step][16][step] with step = 2 for bf16 (the
// layout of the dot-product instructions, and of an AMX tile when 16 such lines are taken together), step = 1
// for float32, and for int8 step = 4 where there are dot products of bytes (I8_STEP), else 1.
//
// int8 products. Where a processor multiplies bytes (VNNI with AVX-512, NEON's dot products), a row of x is rounded to
// 8 bits by blocks of I8_BLOCK along k, each with its own scale (max|x| / 127), as the Q8_0 format of llama.cpp does;
// products of a block are summed as integers, blocks as floats in order. Elsewhere x stays as it is and the weights
// become float32.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <poll.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "kernels/simd.h"
#include "kernels/abi.h"
#include "kernels/checks.h"
#include "kernels/threads.h"
#include "kernels/ranks.h"
#include "kernels/norms.h"
#include "kernels/products/rows.h"
#include "kernels/products/int8.h"
#include "kernels/products/blocks.h"
#include "kernels/products/block_products.h"
#include "kernels/products/amx.h"
#include "kernels/products/block_tiles.h"
#include "kernels/products/vector.h"
#include "kernels/products/dispatch.h"
#include "kernels/products/packing.h"
#include "kernels/attention/portable.h"
#include "kernels/attention/pairs.h"
#include "kernels/attention/tiles.h"
#include "kernels/attention/packed.h"
#include "kernels/adapters.h"
#include "kernels/layers.h"
#include "kernels/run.h"
#include "kernels/rows.h"
#include "kernels/ranking.h"
#include "kernels/sampling.h"
#include "kernels/choices.h"
#include "kernels/pass.h"
#include "kernels/drafts/rows.h"
#include "kernels/drafts/fuse.h"
#include "kernels/drafts/chain.h"
#include "kernels/drafts/tree.h"
#include "kernels/drafts/states.h"
#include "kernels/drafts/spire.h"
#include "kernels/drafts/medusa.h"
#include "kernels/drafts/streams.h"
#include "kernels/lookup.h"
