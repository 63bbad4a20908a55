// The smallest kernel: if this can't be compiled, loaded and run, none can.
struct Params { int* out; };

extern "C" __global__ void probe(const __grid_constant__ Params p) { *p.out = 1; }
