// What the planner and the attention kernel agree on. The tiles of all (request, head) pairs stand in one line, which
// is cut into equal pieces, one per block of the grid; idle requests, of length 0, have none. Or, where all are short,
// blocks take whole pairs side by side, idle ones too.
#pragma once
#include "common.cuh"

// Ints: tiles per block, tiles in all, 0, unused. Side by side: 1, blocks that have work, 1, unused. One PlanEntry per
// block follows.
#define PLAN_HEADER 4

// Where a block begins: tile counts from the request's first. The request's own numbers save a block a dependent load;
// one that is idle has no tokens here.
// The tiles of that request and head are shared by `parts` blocks from first_block on. Side by side, `parts` pairs from
// this one on share the block.
struct __align__(16) PlanEntry { int request, head, tile, length, token0, tokens, first_block, parts; };

struct TileRange { int first, count; };

// Tiles of 16 keys that the `tokens` last positions of a request see. Never empty.
DEVICE TileRange tile_range(int length, int tokens, int window) {
    int low = window ? max(0, length - tokens + 1 - window) : 0;
    return {low / 16, max(1, (length + 15) / 16 - low / 16)};
}
