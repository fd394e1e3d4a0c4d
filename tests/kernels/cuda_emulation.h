// Run a CUDA kernel of one source file on a CPU, lane by lane, for tests without a GPU.
//
// Every thread of a CTA is a fiber. A warp-wide or CTA-wide operation waits for all its threads and
// aborts when they do not meet in the same kind of operation. Asynchronous copies are carried out
// only when they are waited for, so a missing wait reads old bytes. CTAs run one after another.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct Dim3 {
    int x, y, z;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {
constexpr int MAX_THREADS = 256, STACK = 1 << 18;
struct Copy {
    uint32_t to;
    const char *from;
    int bytes;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
struct Meeting {
    int arrived = 0, kind = 0;
    unsigned generation = 0;
    char box[2][MAX_THREADS][64];
};
inline Fiber fibers[MAX_THREADS];
inline ucontext_t scheduler;
inline int current, num_threads;
inline Meeting warps[MAX_THREADS / 32], cta;
inline char memory[232448];
inline void (*body)();

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

// Wait until `count` threads arrived with the same kind; afterwards all inputs can be read.
inline const char (*meet(Meeting &m, int count, int slot, int kind, const void *mine,
                         int bytes))[64] {
    const unsigned generation = m.generation;
    if (m.arrived == 0) m.kind = kind;
    if (m.kind != kind) {
        fprintf(stderr, "threads of one warp or CTA diverged: operations %d and %d\n", m.kind, kind);
        abort();
    }
    memcpy(m.box[generation & 1][slot], mine, bytes);
    if (++m.arrived == count) {
        m.arrived = 0;
        ++m.generation;
    } else {
        while (m.generation == generation) yield();
    }
    return m.box[generation & 1];
}
inline const char (*meet_warp(int kind, const void *mine, int bytes))[64] {
    return meet(warps[current / 32], 32, current % 32, kind, mine, bytes);
}
template <class T>
T value(const char (*box)[64], int lane, int index = 0) {
    T v;
    memcpy(&v, box[lane] + index * sizeof(T), sizeof(T));
    return v;
}
inline void entry() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}
inline void run_cta(int threads) {
    num_threads = threads;
    memset(memory, 0xff, sizeof memory);  // NaN to whoever reads before writing
    for (int i = 0; i < threads; ++i) {
        Fiber &f = fibers[i];
        f.stack.resize(STACK);
        f.done = false;
        f.groups.clear();
        f.open.clear();
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, entry, 0);
    }
    for (int left = threads; left;) {
        left = 0;
        for (current = 0; current < threads; ++current) {
            if (fibers[current].done) continue;
            swapcontext(&scheduler, &fibers[current].context);
            left += !fibers[current].done;
        }
    }
}
}  // namespace emulation

struct ThreadIndex {
    struct X {
        operator int() const { return emulation::current; }
    } x;
};
inline ThreadIndex threadIdx;
inline Dim3 blockIdx, gridDim;
#define shared emulation::memory

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class To, class From>
To bits(From x) {
    To y;
    static_assert(sizeof x == sizeof y);
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return bits<float>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline size_t __cvta_generic_to_shared(const void *p) { return (const char *)p - emulation::memory; }
template <class T>
T __ldcg(const T *p) {
    return *p;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i)
        y |= (unsigned)(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return y;
}
inline void __threadfence() {}
inline unsigned atomicInc(unsigned *p, unsigned limit) {
    const unsigned old = *p;
    *p = old >= limit ? 0 : old + 1;
    return old;
}
inline void __syncthreads() {
    emulation::meet(emulation::cta, emulation::num_threads, emulation::current, 1, "", 1);
}
inline void __syncwarp() { emulation::meet_warp(2, "", 1); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
    return emulation::value<T>(emulation::meet_warp(3, &x, sizeof x), lane & 31);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    const int lane = emulation::current % 32;
    return emulation::value<T>(emulation::meet_warp(4, &x, sizeof x), lane ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    auto box = emulation::meet_warp(5, &x, sizeof x);
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (unsigned)emulation::value<bool>(box, i) << i;
    return y;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }

inline float ex2(float x) {
    const float y = exp2f(x);
    return fabsf(y) < 1.17549435e-38f ? 0.0f : y;
}
inline float lg2(float x) { return log2f(x); }
inline float half_value(uint16_t x) { return (float)bits<_Float16>(x); }
inline float half_low(unsigned x) { return half_value((uint16_t)x); }
inline float half_high(unsigned x) { return half_value((uint16_t)(x >> 16)); }
inline unsigned pack_half(float low, float high) {
    return bits<uint16_t>((_Float16)low) | (unsigned)bits<uint16_t>((_Float16)high) << 16;
}
inline uint16_t to_bf16(float x) {
    const unsigned u = bits<unsigned>(x);
    if (x != x) return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline unsigned pack_bf16(float low, float high) {
    return to_bf16(low) | (unsigned)to_bf16(high) << 16;
}
// Element (row, column) of an 8 x 8 matrix whose row r lies in lanes 4r to 4r + 3.
inline uint16_t element(const char (*box)[64], int row, int column, int index = 0) {
    const unsigned x = emulation::value<unsigned>(box, 4 * row + column / 2, index);
    return (uint16_t)(x >> (16 * (column & 1)));
}
inline unsigned transpose(unsigned x) {
    auto box = emulation::meet_warp(6, &x, sizeof x);
    const int g = emulation::current % 32 / 4, t = emulation::current % 4;
    return element(box, 2 * t, g) | (unsigned)element(box, 2 * t + 1, g) << 16;
}
template <float (*VALUE)(uint16_t)>
void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
         unsigned b1, int kind) {
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    auto box = emulation::meet_warp(kind, mine, sizeof mine);
    const int g = emulation::current % 32 / 4, t = emulation::current % 4;
    for (int j = 0; j < 4; ++j) {
        const int column = 2 * t + (j & 1);
        double sum = c[j];
        for (int k = 0; k < 16; ++k) {
            const float a = VALUE(element(box, g, k & 7, (j >> 1) + 2 * (k >> 3)));
            const float b = VALUE(element(box, column, k & 7, 4 + (k >> 3)));
            sum += (double)a * b;
        }
        c[j] = (float)sum;
    }
}
inline float bf16_value(uint16_t x) { return bits<float>((unsigned)x << 16); }
inline void mma_half(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
    mma<half_value>(c, a0, a1, a2, a3, b0, b1, 7);
}
inline void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
    mma<bf16_value>(c, a0, a1, a2, a3, b0, b1, 8);
}
inline void load_matrices(unsigned (&r)[4], unsigned address, bool transposed) {
    auto box = emulation::meet_warp(transposed ? 9 : 10, &address, sizeof address);
    const int g = emulation::current % 32 / 4, t = emulation::current % 4;
    auto at = [&](int matrix, int row, int column) {
        const unsigned base = emulation::value<unsigned>(box, 8 * matrix + row);
        if (base % 16) abort();
        uint16_t x;
        memcpy(&x, emulation::memory + base + 2 * column, 2);
        return x;
    };
    for (int i = 0; i < 4; ++i)
        r[i] = transposed ? at(i, 2 * t, g) | (unsigned)at(i, 2 * t + 1, g) << 16
                          : at(i, g, 2 * t) | (unsigned)at(i, g, 2 * t + 1) << 16;
}
inline void load_matrix(unsigned (&r)[4], unsigned address) { load_matrices(r, address, false); }
inline void load_matrix_trans(unsigned (&r)[4], unsigned address) {
    load_matrices(r, address, true);
}
inline unsigned load_shared(unsigned address) {
    unsigned x;
    memcpy(&x, emulation::memory + address, 4);
    return x;
}
template <int BYTES>
void copy_async(unsigned to, const void *from) {
    if (to % BYTES || (uintptr_t)from % BYTES) abort();
    emulation::fibers[emulation::current].open.push_back({to, (const char *)from, BYTES});
}
inline void commit() {
    auto &f = emulation::fibers[emulation::current];
    f.groups.push_back(std::move(f.open));
    f.open.clear();
}
template <int LEFT>
void wait() {
    auto &groups = emulation::fibers[emulation::current].groups;
    while (groups.size() > LEFT) {
        for (auto &c : groups.front()) memcpy(emulation::memory + c.to, c.from, c.bytes);
        groups.erase(groups.begin());
    }
}
