// What the planner and the attention kernel agree on. The tiles of all (request, head) pairs stand in one line, which
// is cut into equal pieces, one per block of the grid. Or each pair has a piece of its own, as long as the longest pair.
#pragma once
#include "common.cuh"

#define PLAN_HEADER 4  // ints: tiles per block, tiles in all, is a pair a piece, unused; then one PlanEntry per block

// Where a block begins: tile counts from the request's first. The request's own numbers save a block a dependent load.
// The tiles of that request and head are shared by `parts` blocks from first_block on.
struct __align__(16) PlanEntry { int request, head, tile, length, token0, tokens, first_block, parts; };

struct TileRange { int first, count; };

// Tiles of 16 keys that the `tokens` last positions of a request see. Never empty: somebody has to write zeros.
DEVICE TileRange tile_range(int length, int tokens, int window) {
    int low = window ? max(0, length - tokens + 1 - window) : 0;
    return {low / 16, max(1, (length + 15) / 16 - low / 16)};
}
