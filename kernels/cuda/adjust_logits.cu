// Bias and penalties at single places of the logits, or minus infinity there. Places are distinct.
//
// Macros: LOGITS.
#include "common.cuh"

struct Params {
    u8* logits;               // [rows, vocab]
    const i64* row;           // [places]; a negative one is skipped
    const i64* token;         // [places]
    const float* bias;        // [places]; null: forbid
    const float* repetition;  // [places]
    const float* subtract;    // [places] presence and frequency penalty
    i64 row_stride;           // bytes
    int places, rows, vocab;
};

extern "C" __global__ void __launch_bounds__(256) adjust_logits(Params p) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.places) return;
    const i64 row = p.row[i], token = p.token[i];
    if (row < 0 || row >= p.rows || token < 0 || token >= p.vocab) return;
    u8* at = p.logits + row * p.row_stride;
    float x = LOGITS == 0 ? ((float*)at)[token] : widen<LOGITS == 2>(((u16*)at)[token]);
    if (p.bias) {
        x += p.bias[i];
        x = (x > 0 ? __fdiv_rn(x, p.repetition[i]) : x * p.repetition[i]) - p.subtract[i];
    } else {
        x += negative_infinity();  // NaN and infinity must stay visible
    }
    if (LOGITS == 0) ((float*)at)[token] = x;
    else ((u16*)at)[token] = narrow<LOGITS == 2>(x);
}
