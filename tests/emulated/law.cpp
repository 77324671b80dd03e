#include "cuda.h"
#include "law.cu"

struct Arguments {
    float* weights;
    i64 *masses, *total;
    const float *logits, *temperature;
    const i64* top_k;
    const float *top_p, *min_p;
    const i64* live;
    int vocab, stride, parts, bits;
};
static Arguments given;
static void call() {
    const Arguments& a = given;
    soliton_law(a.weights, a.masses, a.total, a.logits, a.temperature, a.top_k, a.top_p, a.min_p, a.live, a.vocab,
                a.stride, a.parts, a.bits);
}
extern "C" void run(const Arguments* a, int rows) {
    given = *a;
    for (int row = 0; row < rows; ++row) emulated::run(row, call);
}
