// From arguments of a call to what kernels are told: tables of branches, ranges and work, and where workspace goes.
#pragma once

#include <functional>

#include "kernels/cuda/launch.h"
#include "kernels/kernel.h"

namespace longspan::cuda {

inline constexpr int kEveryBranch = -1, kNoBranch = -2;

/// How a kernel cuts its work.
struct Tiling {
  int rows = 0;  // of one item: query rows forward, keys backward; 0 for kernels without items
  bool by_keys = false;
  bool fills = true;          // items for rows that no branch covers; never with by_keys
  bool parts = false;         // under a causal mask, long tiles of every branch before short ones of any
  bool splits = false;        // long lists of a block mask as several items, which add up or are joined
  bool masks_chosen = false;  // adaptive masks are those of an earlier launch of the call
  bool restores = false;      // the kernel leaves counters as it found them (counters.h)
  int branch = kEveryBranch;  // or the only one
};

/// Parts of a call's workspace; null for what it does not need, and without memory.
struct Workspace {
  std::byte *lengths = nullptr, *adaptive = nullptr;
  unsigned* counters = nullptr;
  float *state_sums = nullptr, *state = nullptr, *delta = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  std::size_t counters_bytes = 0, total = 0;
  bool sums_keys = false;  // dk and dv are among them
};

/// Rows that a row of out, or of dk, sums up at most: those of the longest strand or list of blocks. Beyond kRowsOfSum
/// of them sums are closed, which takes workspace.
std::int64_t longest_sum(const Plan& plan);

/// Everything a call may need. `matrix`: the matrix-unit kernels, which add up across items.
Workspace layout(const Plan& plan, Pass pass, bool matrix, std::byte* memory = nullptr);

/// Whether a backward call has accumulators for dk and dv if it needs them. Plans do not know how many ranges a call
/// has: as many query rows as tokens are taken for the whole sequence, which a list of ranges may contradict.
bool has_key_sums(const BackwardArguments& arguments);

/// Whether a backward cuts long lists of block masks into several items; never where gradients are deterministic.
bool splits_lists(const Plan& plan);
/// Whether lists that are the same for every call are long, so that deterministic gradients may cut them too.
bool cuts_lists(const Plan& plan);
/// Whether calls make a branch's mask. A cached plan has to answer as the plan of a call does, so theirs count as long
/// ones.
bool made_by_calls(const Plan& plan, std::size_t branch);

/// Parts that a forward cuts lists of a branch's mask into, for each strand: those of a mask that calls do not make,
/// where rows are of one branch only.
std::int64_t slots_of(const Plan& plan, std::size_t branch, int tile_rows);

/// Whether several items add to one row of dk: grouped queries, branches that share rows, several ranges, split lists.
bool sums_keys(const Plan& plan, std::size_t ranges);

/// Whether every row is in some strand whatever the call says.
bool covers_everything(const Plan& plan);

/// Calls run(launch) once, or, for more query ranges than one launch holds, once for each part of them.
void for_each_launch(const ForwardArguments& arguments, Tiling tiling, bool matrix,
                     const std::function<void(Launch&)>& run);
void for_each_launch(const BackwardArguments& arguments, Tiling tiling, bool matrix,
                     const std::function<void(Launch&)>& run);

/// Gives a launch tables of work cut in another way.
void add_work(Launch& launch, const Plan& plan, Tiling tiling);

/// Makes two items of each of the last tiles of a forward whose items all run at once, where they would give at most
/// half of the multiprocessors a tile more than the rest: half a tile more is what the longest then takes.
void halve_last_tiles(Launch& launch, int multiprocessors, int blocks_at_once);

/// The same work in launches in each of which a row of dq, and of dk and dv, has one writer: branch by branch, range by
/// range, and head by head of a group of `group` that shares its keys.
void for_each_writer(const Launch& launch, int group, const std::function<void(const Launch&)>& run);

/// Ranges one launch holds.
std::size_t ranges_per_launch(const Plan& plan);

}  // namespace longspan::cuda
