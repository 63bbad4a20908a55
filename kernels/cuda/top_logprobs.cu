// Log-softmax of one token and of the best few of each row, after `scan_logits.cu` with LOGPROBS.
//
// Macros: LOGITS, SHARED.
#define ROW_THREADS 512
#include "search.cuh"

struct Params {
    const u8* logits;        // [rows, vocab]
    const Summary* summary;  // [rows, parts]
    const u8* maxima;        // [rows, 2, parts, 32] logits
    const u32* above;        // [rows, parts]
    const i64* token;        // [rows]
    float* own;              // [rows]
    i64* rank;               // [rows]
    i64* ids;                // [rows, count]
    float* values;           // [rows, count]
    i64 row_stride;          // bytes
    int vocab, parts, count;
};

constexpr float LEAST = -9999.0f;  // stands for minus infinity and NaN

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) top_logprobs(Params p) {
    wait_for_previous();
    Shared& s = shared_memory();
    const int at = blockIdx.x;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts, p.maxima + (i64)at * p.parts * (32 * SCANNED)};
    const u64 peak = load_summaries(s, p.summary + (i64)at * p.parts, p.parts);
    if (!is_finite(peak)) {
        for (int i = threadIdx.x; i < p.count; i += ROW_THREADS) {
            p.ids[(i64)at * p.count + i] = i;
            p.values[(i64)at * p.count + i] = LEAST;
        }
        if (threadIdx.x == 0) p.own[at] = LEAST, p.rank[at] = 1;
        return;
    }
    const Weight weight(value_of_rank(peak), 1.0f);
    const double mass = (double)load_masses(s, p.parts, weight) / ONE;
    const float log_mass = logf((float)mass);
    u64 above = 0;
    for (int i = threadIdx.x; i < p.parts; i += ROW_THREADS) above += p.above[(i64)at * p.parts + i];
    above = sum_of_block(s, above);
    if (threadIdx.x == 0) {
        float x = load_logit(row, (int)min(max(p.token[at], 0ll), (i64)p.vocab - 1));
        p.own[at] = fmaxf(x - weight.peak - log_mass, LEAST);
        p.rank[at] = (i64)above + 1;
    }
    if (p.count == 0) return;
    u64 low = p.count <= p.parts ? bound_of(s, p.parts, p.count, peak) : 0;
    int n = gather(s, row, low);
    auto one = [](u64) { return 1ull; };
    if (n > SORTED) n = gather(s, row, find_cut(s, low, peak, p.count, one, ElementsOf{row}));
    sort(s, n);
    for (int i = threadIdx.x; i < p.count; i += ROW_THREADS) {
        u64 rank = s.candidate[i];
        p.ids[(i64)at * p.count + i] = id_of_rank(rank);
        p.values[(i64)at * p.count + i] = fmaxf(value_of_rank(rank) - weight.peak - log_mass, LEAST);
    }
}
