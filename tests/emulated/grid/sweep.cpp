// sweep.cu for a CPU; see chip.h.

#include "sweep.cu"

static struct {
    const Instr* list;
    int count;
    const i64* live;
    int rows;
    u32* counter;
    u64* carry;
    int size;
} given_to;

static void one() {
    soliton_sweep(given_to.list, given_to.count, given_to.live, given_to.rows, given_to.counter, given_to.carry, nullptr, given_to.size);
}

extern "C" int run(const void* list, int count, const void* live, int rows, void* counter, void* carry, int size, int grid, int seed) {
    given_to = {(const Instr*)list, count, (const i64*)live, rows, (u32*)counter, (u64*)carry, size};
    emulated::body = one;
    return emulated::run(grid, THREADS, (unsigned)seed) ? 0 : 1;
}
extern "C" int beside() { return (int)sizeof(Shared); }
