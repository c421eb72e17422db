// Attention on CUDA cores, float32 throughout: one warp per row, 32 keys at a time. Exact for float32 storage, every
// option, and the same bits on every run: no sum is shared between warps.
//   scores    a lane has one key (or, for dk and dv, one query) and reads its row; the warp's own row is in shared
//             memory
//   sums      a lane has columns lane, lane + 32, ...; rows are read together, coalesced
#pragma once

#include "kernels/cuda/arithmetic.cuh"
#include "kernels/cuda/launch.h"
#include "util/philox.h"

namespace longspan::cuda {

inline constexpr int kLanes = 32, kSimtWarps = 8, kMaxColumns = 256, kPerLane = kMaxColumns / kLanes;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

template <class T>
__device__ __forceinline__ const T* row_of(const Rows& rows, int entry, std::int64_t row, int head) {
  return reinterpret_cast<const T*>(rows.data) + rows.offset(entry, row, head);
}

template <class T>
__device__ __forceinline__ float dot_row(const float* shared_row, const T* row, int columns, bool aligned) {
  constexpr int kWide = 16 / sizeof(T);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (aligned) {
    for (int column = 0; column < columns; column += kWide) {
      alignas(16) T elements[kWide];
      *reinterpret_cast<uint4*>(elements) = *reinterpret_cast<const uint4*>(row + column);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sums[i % 4] = fmaf(shared_row[column + i], as_float(elements[i]), sums[i % 4]);
    }
  } else {
    for (int column = 0; column < columns; ++column) {
      sums[column % 4] = fmaf(shared_row[column], as_float(row[column]), sums[column % 4]);
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class T>
__device__ __forceinline__ void load_shared(float* target, const T* row, int columns, int lane) {
  for (int column = lane; column < columns; column += kLanes) target[column] = as_float(row[column]);
}

/// sums += weight * row, the row read by the whole warp.
template <class T>
__device__ __forceinline__ void add_weighted(float (&sums)[kPerLane], float weight, const T* row, int columns,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + i * kLanes < columns) sums[i] = fmaf(weight, as_float(row[lane + i * kLanes]), sums[i]);
  }
}

template <class T>
__device__ __forceinline__ void store_row(T* row, const float (&sums)[kPerLane], float factor, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + i * kLanes < columns) row[lane + i * kLanes] = from_float<T>(factor * sums[i]);
  }
}

__device__ __forceinline__ void add_row(float* row, const float (&sums)[kPerLane], float factor, int columns,
                                        int lane) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + i * kLanes < columns) row[lane + i * kLanes] += factor * sums[i];
  }
}

template <class T>
__device__ __forceinline__ const T* pointer_of_lane(const T* pointer, int source) {
  return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), source));
}

/// A position's strand in one branch.
struct SimtRow {
  StrandRows strand;
  int branch, own, end, padding;  // its row; keys are rows [0, end), those of active blocks if the branch has a mask
};

/// What the branch's mask leaves of rows [begin, end) for a row: keys of a query, or queries of a key, as the lists
/// are.
__device__ __forceinline__ BlockWalk walk_of(const Launch& a, const SimtRow& row, int entry, int head, int begin,
                                             int end) {
  const BlockLists& lists = a.schedule.lists[row.branch];
  return lists.walk(lists.place(entry, head, row.own >> lists.shift), begin, end);
}

__device__ __forceinline__ bool find_row(const Launch& a, int b, int head, int position, int length, SimtRow& found) {
  const DeviceBranch& branch = a.schedule.branches[b];
  if (!branch.owns(head) || position >= length || !branch.active(length) || !branch.covers(head, position))
    return false;
  found.branch = b;
  found.strand = branch.strand(head, position / branch.segment, length);
  found.own = (position - found.strand.start) / found.strand.stride;
  found.end = a.rules.causal ? found.own + 1 : found.strand.count;
  found.padding = branch.padding(found.strand.count, length, a.rules.causal);
  return true;
}

/// What all warps of a launch share.
struct SimtCall {
  const Launch& a;
  DropoutRule dropout;
  __device__ explicit SimtCall(const Launch& launch)
      : a(launch), dropout(0.0, launch.rules.seed_pointer ? *launch.rules.seed_pointer : launch.rules.seed) {
    dropout.threshold = launch.rules.drop_threshold;
  }
  __device__ float bias(int head, int position, int key) const {
    return a.rules.alibi ? a.rules.alibi[head * a.rules.alibi_head] * static_cast<float>(abs(position - key)) : 0.0f;
  }
  __device__ float factor(int b, int entry, int head, int position, int key_index) const {
    if (!a.rules.dropout) return 1.0f;
    return dropout.keeps(position, key_index, b * a.tensors.heads + head, entry) ? a.rules.keep_factor : 0.0f;
  }
  /// Row of q -> its position, over the ranges of this launch.
  __device__ bool query(std::int64_t flat, int& position, std::int64_t& row) const {
    for (int r = 0; r < a.schedule.range_count; ++r) {
      if (flat < a.schedule.ranges[r].count) {
        position = a.schedule.ranges[r].start + static_cast<int>(flat);
        row = a.schedule.ranges[r].first_row + flat;
        return true;
      }
      flat -= a.schedule.ranges[r].count;
    }
    return false;
  }
};

/// A sum over a long strand: what was added since kRowsOfSum rows were closed, and what was closed.
struct LongSum {
  float now[kPerLane] = {}, closed[kPerLane] = {};
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      closed[i] += now[i];
      now[i] = 0.0f;
    }
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      now[i] *= factor;
      closed[i] *= factor;
    }
  }
};

/// Calls body(key_index, attended, k_row, v_row) with a key per lane, for the keys of a row in one branch, and close()
/// where sums are to be closed.
template <class T, class Body, class Close>
__device__ __forceinline__ void for_each_keys(const SimtCall& call, int entry, int head, const SimtRow& row, int lane,
                                              Body&& body, Close&& close) {
  const int kv_head = head / (call.a.tensors.heads / call.a.tensors.kv_heads);
  const bool listed = call.a.schedule.lists[row.branch].places;
  BlockWalk walk;
  if (listed) walk = walk_of(call.a, row, entry, head, 0, row.end);
  const int count = listed ? walk.rows() : row.end;
  for (int first = 0; first < count; first += kLanes) {
    if (first % kRowsOfSum == 0 && first > 0) close();
    const int x = first + lane, key = x < count && listed ? walk.row(x) : x;
    const int position = row.strand.start + key * row.strand.stride;
    bool attended = x < count && key < row.end && call.a.rules.allowed(entry, position);
    const char *k_row = nullptr, *v_row = nullptr;
    if (attended) call.a.tensors.key_row(entry, kv_head, position, sizeof(T), k_row, v_row);
    attended = attended && k_row;
    const unsigned any = __ballot_sync(~0u, attended);
    if (any) body(key, position, attended, any, reinterpret_cast<const T*>(k_row), reinterpret_cast<const T*>(v_row));
  }
}

template <class T>
__global__ void __launch_bounds__(kSimtWarps* kLanes)
    simt_forward(const __grid_constant__ Launch a, std::int64_t rows) {
  __shared__ float own_rows[kSimtWarps][kMaxColumns];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kSimtWarps + warp;
  if (flat >= rows * a.tensors.heads * a.tensors.batch) return;
  const SimtCall call(a);
  int position = 0;
  std::int64_t row = 0;
  call.query(flat % rows, position, row);
  const int head = static_cast<int>(flat / rows % a.tensors.heads),
            entry = static_cast<int>(flat / rows / a.tensors.heads);
  const int length = a.tensors.length(entry);
  float* const q = own_rows[warp];
  load_shared(q, row_of<T>(a.tensors.q, entry, row, head), a.tensors.columns, lane);
  __syncwarp();

  float largest = -LONGSPAN_INFINITY, sum = 0.0f, closed_sum = 0.0f;
  LongSum out;
  const auto base = [&] { return largest == -LONGSPAN_INFINITY ? 0.0f : largest; };
  const auto raise = [&](float to) {
    if (!(to > largest)) return;
    const float correction = expf(largest - to);
    largest = to;
    if (sum == 0.0f && closed_sum == 0.0f) return;
    sum *= correction;
    closed_sum *= correction;
    out.scale(correction);
  };
  const auto close = [&] {
    closed_sum += sum;
    sum = 0.0f;
    out.close();
  };
  SimtRow found;
  for (int b = 0; b < a.schedule.branch_count; ++b) {
    if (!find_row(a, b, head, position, length, found)) continue;
    for_each_keys<T>(
        call, entry, head, found, lane,
        [&](int key, int key_position, bool attended, unsigned any, const T* k_row, const T* v_row) {
          float score = -LONGSPAN_INFINITY;
          if (attended)
            score = a.rules.scale * dot_row(q, k_row, a.tensors.columns, a.tensors.aligned) -
                    call.bias(head, position, key_position);
          raise(warp_max(score));
          float weight = attended ? expf(score - base()) : 0.0f;
          sum += warp_sum(weight);
          weight *= call.factor(b, entry, head, position, key);
          for (unsigned left = any; left; left &= left - 1) {
            const int source = __ffs(left) - 1;
            add_weighted(out.now, __shfl_sync(~0u, weight, source), pointer_of_lane(v_row, source), a.tensors.columns,
                         lane);
          }
        },
        close);
    if (found.padding > 0) {
      raise(fmaxf(largest, 0.0f));
      sum += static_cast<float>(found.padding) * expf(-base());
    }
  }
  close();
  sum = closed_sum;
  T* const target = reinterpret_cast<T*>(a.tensors.out.data) + a.tensors.out.offset(entry, row, head);
  store_row(target, out.closed, sum == 0.0f ? 0.0f : a.rules.output_scale / sum, a.tensors.columns, lane);
  if (a.tensors.lse.data && lane == 0)
    a.tensors.lse.at(entry, row, head) = sum == 0.0f ? -LONGSPAN_INFINITY : base() + logf(sum);
}

/// dq of each query row, and delta (one, or one per branch with detached_mix) for the pass over keys.
template <class T>
__global__ void __launch_bounds__(kSimtWarps* kLanes)
    simt_backward_queries(const __grid_constant__ Launch a, std::int64_t rows) {
  __shared__ float own_rows[kSimtWarps][2][kMaxColumns];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kSimtWarps + warp;
  if (flat >= rows * a.tensors.heads * a.tensors.batch) return;
  const SimtCall call(a);
  int position = 0;
  std::int64_t row = 0;
  call.query(flat % rows, position, row);
  const int head = static_cast<int>(flat / rows % a.tensors.heads),
            entry = static_cast<int>(flat / rows / a.tensors.heads);
  const int length = a.tensors.length(entry);
  float *const q = own_rows[warp][0], *const dout = own_rows[warp][1];
  load_shared(q, row_of<T>(a.tensors.q, entry, row, head), a.tensors.columns, lane);
  load_shared(dout, row_of<T>(a.gradients.dout, entry, row, head), a.tensors.columns, lane);
  __syncwarp();
  const T* const out = row_of<T>(a.tensors.out, entry, row, head);
  float delta = 0.0f;
  for (int column = lane; column < a.tensors.columns; column += kLanes)
    delta = fmaf(dout[column], as_float(out[column]), delta);
  delta = warp_sum(delta);
  if (a.gradients.dlse.data) delta -= a.gradients.dlse.at(entry, row, head);
  const float lse = a.tensors.lse.at(entry, row, head);
  float* const deltas =
      a.gradients.delta + a.tensors.packed_row(entry, row, head) * (a.gradients.detached ? a.schedule.branch_count : 1);
  if (!a.gradients.detached && lane == 0) *deltas = delta;

  LongSum dq;
  SimtRow found;
  for (int b = 0; b < a.schedule.branch_count && lse != -LONGSPAN_INFINITY; ++b) {
    if (!find_row(a, b, head, position, length, found)) continue;
    if (a.gradients.detached) {
      // The branch's own softmax, streamed: sum of weights and of weight * (dO . v).
      float largest = -LONGSPAN_INFINITY, sum = 0.0f, product = 0.0f;
      for_each_keys<T>(
          call, entry, head, found, lane,
          [&](int key, int key_position, bool attended, unsigned, const T* k_row, const T* v_row) {
            float score = -LONGSPAN_INFINITY, weighted = 0.0f;
            if (attended) {
              score = a.rules.scale * dot_row(q, k_row, a.tensors.columns, a.tensors.aligned) -
                      call.bias(head, position, key_position);
              weighted = call.factor(b, entry, head, position, key) *
                         dot_row(dout, v_row, a.tensors.columns, a.tensors.aligned);
            }
            const float highest = fmaxf(largest, warp_max(score));
            const float correction = expf(largest - (highest == -LONGSPAN_INFINITY ? 0.0f : highest));
            largest = highest;
            const float weight = attended ? expf(score - largest) : 0.0f;
            sum = sum * correction + warp_sum(weight);
            product = product * correction + warp_sum(weight * weighted);
          },
          [] {});
      if (found.padding > 0) {
        const float highest = fmaxf(largest, 0.0f), correction = expf(largest - highest);
        sum = sum * correction + static_cast<float>(found.padding) * expf(-highest);
        product *= correction;
      }
      delta = sum == 0.0f ? 0.0f : a.rules.output_scale * product / sum;
      if (lane == 0) deltas[b] = delta;
    }
    for_each_keys<T>(
        call, entry, head, found, lane,
        [&](int key, int key_position, bool attended, unsigned any, const T* k_row, const T* v_row) {
          float dscore = 0.0f;
          if (attended) {
            const float score = a.rules.scale * dot_row(q, k_row, a.tensors.columns, a.tensors.aligned) -
                                call.bias(head, position, key_position);
            const float dweight = a.rules.output_scale * dot_row(dout, v_row, a.tensors.columns, a.tensors.aligned);
            dscore = expf(least(score - lse, 0.0f)) * (call.factor(b, entry, head, position, key) * dweight - delta);
          }
          for (unsigned left = any; left; left &= left - 1) {
            const int source = __ffs(left) - 1;
            add_weighted(dq.now, __shfl_sync(~0u, dscore, source), pointer_of_lane(k_row, source), a.tensors.columns,
                         lane);
          }
        },
        [&] { dq.close(); });
  }
  dq.close();
  store_row(reinterpret_cast<T*>(a.gradients.dq.data) + a.gradients.dq.offset(entry, row, head), dq.closed,
            a.rules.scale, a.tensors.columns, lane);
}

/// dk and dv of each key row: every head of its group, every branch, every range, in that order.
template <class T>
__global__ void __launch_bounds__(kSimtWarps* kLanes) simt_backward_keys(const __grid_constant__ Launch a) {
  __shared__ float own_rows[kSimtWarps][2][kMaxColumns];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kSimtWarps + warp;
  if (flat >= static_cast<std::int64_t>(a.tensors.tokens) * a.tensors.kv_heads * a.tensors.batch) return;
  const SimtCall call(a);
  const int key = static_cast<int>(flat % a.tensors.tokens),
            kv_head = static_cast<int>(flat / a.tensors.tokens % a.tensors.kv_heads),
            entry = static_cast<int>(flat / a.tensors.tokens / a.tensors.kv_heads);
  const int length = a.tensors.length(entry), group = a.tensors.heads / a.tensors.kv_heads;
  float *const k = own_rows[warp][0], *const v = own_rows[warp][1];
  LongSum dk, dv;
  const char *k_row = nullptr, *v_row = nullptr;
  if (key < length && a.rules.allowed(entry, key)) a.tensors.key_row(entry, kv_head, key, sizeof(T), k_row, v_row);
  if (k_row) {
    load_shared(k, reinterpret_cast<const T*>(k_row), a.tensors.columns, lane);
    load_shared(v, reinterpret_cast<const T*>(v_row), a.tensors.columns, lane);
    __syncwarp();
    SimtRow found;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int b = 0; b < a.schedule.branch_count; ++b) {
        if (!find_row(a, b, head, key, length, found)) continue;
        for (int r = 0; r < a.schedule.range_count; ++r) {
          const StrandQueries queries = a.schedule.ranges[r].of(found.strand);
          const bool listed = a.schedule.lists[b].places;
          BlockWalk walk;
          if (listed) walk = walk_of(a, found, entry, head, queries.begin, queries.begin + queries.count);
          const int skip =
              a.rules.causal ? max(0, found.own - queries.begin) : 0;  // queries before it do not see a key
          const int count = listed ? walk.rows() : queries.count;
          for (int first = listed ? 0 : skip; first < count; first += kLanes) {
            if (first / kRowsOfSum > (first - kLanes) / kRowsOfSum) dk.close(), dv.close();
            const int x = first + lane, local = x < count && listed ? walk.row(x) - queries.begin : x;
            const std::int64_t row = queries.q_row + static_cast<std::int64_t>(local) * found.strand.stride;
            const T *q_row = nullptr, *do_row = nullptr;
            float dscore = 0.0f, weight = 0.0f;
            if (x < count && local >= skip && local < queries.count) {
              const float lse = a.tensors.lse.at(entry, row, head);
              if (lse != -LONGSPAN_INFINITY) {
                q_row = row_of<T>(a.tensors.q, entry, row, head);
                do_row = row_of<T>(a.gradients.dout, entry, row, head);
                const int position = found.strand.start + (queries.begin + local) * found.strand.stride;
                const float score = a.rules.scale * dot_row(k, q_row, a.tensors.columns, a.tensors.aligned) -
                                    call.bias(head, position, key);
                const float probability = expf(least(score - lse, 0.0f)),
                            factor = call.factor(b, entry, head, position, found.own);
                const float delta = a.gradients.delta[a.tensors.packed_row(entry, row, head) *
                                                          (a.gradients.detached ? a.schedule.branch_count : 1) +
                                                      (a.gradients.detached ? b : 0)];
                weight = probability * factor;
                dscore =
                    probability *
                    (factor * a.rules.output_scale * dot_row(v, do_row, a.tensors.columns, a.tensors.aligned) - delta);
              }
            }
            for (unsigned left = __ballot_sync(~0u, q_row != nullptr); left; left &= left - 1) {
              const int source = __ffs(left) - 1;
              add_weighted(dk.now, __shfl_sync(~0u, dscore, source), pointer_of_lane(q_row, source), a.tensors.columns,
                           lane);
              add_weighted(dv.now, __shfl_sync(~0u, weight, source), pointer_of_lane(do_row, source), a.tensors.columns,
                           lane);
            }
          }
        }
      }
    }
  }
  dk.close(), dv.close();
  if (a.gradients.piece_gradients) {
    if (!k_row) return;
    add_row(a.gradient_row(entry, kv_head, key, false), dk.closed, a.rules.scale, a.tensors.columns, lane);
    add_row(a.gradient_row(entry, kv_head, key, true), dv.closed, a.rules.output_scale, a.tensors.columns, lane);
    return;
  }
  store_row(reinterpret_cast<T*>(a.gradients.dk.data) + a.gradients.dk.offset(entry, key, kv_head), dk.closed,
            a.rules.scale, a.tensors.columns, lane);
  store_row(reinterpret_cast<T*>(a.gradients.dv.data) + a.gradients.dv.offset(entry, key, kv_head), dv.closed,
            a.rules.output_scale, a.tensors.columns, lane);
}

}  // namespace longspan::cuda
