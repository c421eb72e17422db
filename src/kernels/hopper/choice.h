// The tile shape of the Hopper forward, as the host chooses it.
#pragma once

namespace longspan::hopper {

/// The tile shape for a problem: a function of the whole problem, never of the part of it that a call computes.
struct Choice {
  int columns = 0;      // head dim of the instantiation
  int groups = 0;       // warp groups that compute, 64 query rows each
  int keys = 0;         // of one tile
  int stages = 0;       // tiles of K and of V in shared memory
  int strand = 0;       // the length of strand it was chosen for
  int packed = 1;       // strands that share a tile of queries, each with groups of its own
  int streams = 1;      // items that a block works on side by side
  bool lists = false;   // keys by lists of a block mask
  bool passes = false;  // groups of an item have lists of their own
  bool extras = false;  // key_mask, ALiBi, a scale that is not positive, dropout; with lists: whatever else is rare
  int part_rows = 0;    // tiles of keys are parts of blocks, loaded that many rows at a time; 0: whole tiles
  int blocks = 0;
  bool drops = false;  // dropout
};

}  // namespace longspan::hopper
