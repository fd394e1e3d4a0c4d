// Decode attention over 2-bit keys and values and BF16 windows, one launch.
//
// Compiled at run time (NVRTC, no headers) once per combination of
//   HEAD_DIM 64|128|256, GROUP_SIZE 32|64|128, PAGE_SIZE, SINKS, GROUP (query heads per KV head).
//
// Grid (KV heads * head blocks, batch, packed CTAs + window CTAs); four warps per CTA. A warp works
// alone on tiles of 32 tokens: asynchronous copies into its own shared-memory ring, ldmatrix, one
// AND per two codes, mma.m16n8k16. `word & (3 << e)` read as fp16 is the subnormal code*2^(e-24),
// exactly, so no code is ever converted; scale and zero touch logits and probabilities only.
// Tokens are the 16-row side of both products, query heads the 8-column side. The four warps merge
// in shared memory, and the last CTA of a (request, KV head) to finish merges all partial results.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 32;
constexpr int STAGES = 4;
constexpr int HEADS = 8;  // columns of an MMA; a KV head with more queries takes several CTAs
constexpr int HEAD_BLOCKS = (GROUP + HEADS - 1) / HEADS;
constexpr int ROW_BYTES = HEAD_DIM / 4;
constexpr int CHUNKS = ROW_BYTES / 16;  // 16-byte pieces of a code row: 1, 2 or 4
constexpr int NUM_GROUPS = HEAD_DIM / GROUP_SIZE;
constexpr int META_BYTES = 4 * NUM_GROUPS;
constexpr int MMAS = HEAD_DIM / 16;  // products of depth 16 (keys) or height 16 (values)
constexpr int MMAS_PER_GROUP = GROUP_SIZE / 16;
constexpr int CODES_BYTES = TILE * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * CODES_BYTES + 2 * TILE * META_BYTES;
constexpr int WARP_BYTES = STAGES * STAGE_BYTES;
constexpr int CTA_TOKENS = WARPS * TILE;  // a packed CTA's tokens are a multiple
constexpr int WINDOW_TOKENS = WARPS * 16;
// A tile then never crosses a page: its rows are consecutive.
constexpr bool WITHIN_PAGE = PAGE_SIZE % TILE == 0 && SINKS % TILE == 0;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float QUERY_HEADROOM = 4096.0f;   // the largest operand of a query row is 2^12 to 2^13
constexpr float RAISE = 8.0f;               // logits may exceed the running maximum by 2^8
constexpr float SCALE_LIMIT = 32.0f;        // scale * to_half stays below: p * scale < 2^13
constexpr float SMALLEST_SCALE = 5.9604644775390625e-08f;
constexpr float TWO24 = 16777216.0f;
#define NEG_INF __int_as_float(0xff800000)
static_assert(WARP_BYTES >= HEADS * HEAD_DIM * 4, "a warp's result must fit its ring");
static_assert(WARP_BYTES >= 16 * HEAD_DIM * 4, "a dequantized window tile must fit the ring");

#ifndef KVQUANT_EMULATION  // a test runs this file on a CPU with its own primitives
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float half_low(u32 x) {
    float y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ float half_high(u32 x) {
    float y;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_matrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 y;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address) : "memory");
    return y;
}
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 shared, const void *global) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global),
                     "n"(BYTES)
                     : "memory");
    }
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#endif
__device__ __forceinline__ float bf16_low(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(u32 x) { return __int_as_float(x & 0xffff0000u); }

// Weight 2^e of a field: fields 0 to 4 are masked in place, 5 to 7 after a shift by ten bits.
__host__ __device__ constexpr float field_weight(int field) {
    return float(1 << (2 * (field < 5 ? field : field - 5)));
}
// Two lanes' codes of one field as fp16 subnormals. `shifted` is word >> 10: what crosses from the
// upper lane lands above bit 5 of the lower one and is masked off.
__device__ __forceinline__ u32 field(u32 word, u32 shifted, int f) {
    return f < 5 ? word & (0x00030003u << (2 * f)) : shifted & (0x00030003u << (2 * (f - 5)));
}
// 16-byte pieces of a code row are swizzled so that ldmatrix reads all banks once.
__device__ __forceinline__ int swizzle(int token, int chunk) {
    if constexpr (CHUNKS == 1) return 0;
    if constexpr (CHUNKS == 2) return chunk ^ ((token >> 2) & 1);
    return chunk ^ ((token >> 1) & 3);
}

struct Params {
    const u16 *q;  // bf16 [batch, num_q_heads, HEAD_DIM]
    const char *k_codes, *k_meta, *v_codes, *v_meta;
    const u16 *ring_k, *ring_v, *sink_k, *sink_v;  // bf16
    const int *page_table, *kv_lens, *ring_row, *ring_begin, *sink_group;
    float *o_parts, *lse_parts;
    u32 *counters;  // zero between launches
    u16 *out;       // bf16
    float *lse;
    long long stride_q_batch, stride_q_head, stride_table;
    int num_kv_heads, recent_tokens, num_splits, window_splits, min_split_tokens;
    float sm_scale;
};

// Running softmax of a warp. Columns: query heads 2*(lane%4) and 2*(lane%4)+1 of the head block.
struct State {
    float acc[MMAS][4];  // rows: dims 16*i + lane/4 and + 8
    float m[2], l[2], z[NUM_GROUPS][2];
};

__device__ __forceinline__ void reset(State &s) {
#pragma unroll
    for (int i = 0; i < MMAS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s.acc[i][j] = 0.0f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        s.m[c] = NEG_INF;
        s.l[c] = 0.0f;
#pragma unroll
        for (int g = 0; g < NUM_GROUPS; ++g) s.z[g][c] = 0.0f;
    }
}

__device__ __forceinline__ float over_rows_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
__device__ __forceinline__ float over_rows_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

// Keep a value in its register: recomputing lane constants in the loop costs issue slots.
__device__ __forceinline__ void pin(u32 &x) { asm volatile("" : "+r"(x)); }

// Where a lane reads and writes; offsets within a stage, sources for this KV head.
struct Lane {
    u32 copy_to, k_from, v_from, meta_from;
};

// Issue the copies of one tile. `row` is the row of this lane's token, or of the tile's first token
// where a tile lies inside a page.
__device__ __forceinline__ void issue_tile(const Params &p, const Lane &at, u32 stage, u32 row,
                                           int lane) {
    constexpr int TOKENS = 32 / CHUNKS;  // of one copy instruction
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        u64 offset;
        if constexpr (WITHIN_PAGE) {
            offset = (u64)row * ROW_BYTES + lane * 16 + i * 512;
        } else {
            const u32 source = __shfl_sync(~0u, row, lane / CHUNKS + TOKENS * i);
            offset = (u64)source * ROW_BYTES + lane % CHUNKS * 16;
        }
        const u32 target = stage + at.copy_to + i * 512;
        copy_async<16>(target, p.k_codes + offset);
        copy_async<16>(target + CODES_BYTES, p.v_codes + offset);
    }
    const u32 meta = stage + 2 * CODES_BYTES + lane * META_BYTES;
    const u64 offset = (u64)row * META_BYTES + (WITHIN_PAGE ? lane * META_BYTES : 0);
    constexpr int PIECE = META_BYTES < 16 ? META_BYTES : 16;
#pragma unroll
    for (int i = 0; i < META_BYTES; i += PIECE) {
        copy_async<PIECE>(meta + i, p.k_meta + offset + i);
        copy_async<PIECE>(meta + TILE * META_BYTES + i, p.v_meta + offset + i);
    }
}

// Packed tokens [begin, end) of the CTA; this warp's tiles are every fourth one.
__device__ __forceinline__ void packed_part(const Params &p, State &s, u32 ring, int lane, int warp,
                                            int batch, int kv_head, int first_head, int begin,
                                            int end) {
    const int g = lane >> 2, t = lane & 3;
    const int count = (end - begin - warp * TILE + WARPS * TILE - 1) / (WARPS * TILE);
    if (end - begin <= warp * TILE) return;

    // Queries as B fragments, each row scaled by a power of two into fp16's range.
    u32 q[MMAS][2];
    float q_sum[NUM_GROUPS];
    const bool real = first_head + g < GROUP;
    const u16 *q_row = p.q + batch * p.stride_q_batch +
                       (long long)(kv_head * GROUP + first_head + (real ? g : 0)) * p.stride_q_head;
    float largest = 1e-30f;
#pragma unroll
    for (int i = 0; i < MMAS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            q[i][h] = real ? *(const u32 *)(q_row + 16 * i + 8 * h + 2 * t) : 0u;
            largest = fmaxf(largest, fmaxf(fabsf(bf16_low(q[i][h])), fabsf(bf16_high(q[i][h]))));
        }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float unit = __int_as_float(__float_as_int(largest) & 0x7f800000);
    const float to_operand = QUERY_HEADROOM / unit;
#pragma unroll
    for (int n = 0; n < NUM_GROUPS; ++n) q_sum[n] = 0.0f;
#pragma unroll
    for (int i = 0; i < MMAS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float low = bf16_low(q[i][h]), high = bf16_high(q[i][h]);
            q_sum[i / MMAS_PER_GROUP] += low + high;
            const float w = to_operand / field_weight((16 * i + 8 * h) / (HEAD_DIM / 8));
            q[i][h] = pack_half(low * w, high * w);
        }
    // logit = (scale * dot + zero * zero_factor) * logit_factor
    float logit_factor[2], zero_factor[NUM_GROUPS][2];
    const float own = unit * (p.sm_scale * LOG2E * TWO24 / QUERY_HEADROOM);
#pragma unroll
    for (int c = 0; c < 2; ++c) logit_factor[c] = __shfl_sync(~0u, own, (2 * t + c) * 4);
#pragma unroll
    for (int n = 0; n < NUM_GROUPS; ++n) {
        float sum = q_sum[n];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum *= QUERY_HEADROOM / TWO24 / unit;
#pragma unroll
        for (int c = 0; c < 2; ++c) zero_factor[n][c] = __shfl_sync(~0u, sum, (2 * t + c) * 4);
    }

    const int *table = p.page_table + batch * p.stride_table;
    // Each lane follows its own token, or all of them the tile's first. Tokens past the end repeat
    // the last one (or are in its page), so every address is one of this request.
    int ahead = begin + warp * TILE + (WITHIN_PAGE ? 0 : lane);
    auto next_row = [&](int page) {
        const int pos = min(ahead, end - 1);
        return ((u32)page * p.num_kv_heads + kv_head) * PAGE_SIZE + (u32)pos % PAGE_SIZE;
    };
    auto load_page = [&](int pos) { return table[(u32)min(pos, end - 1) / PAGE_SIZE]; };
    const int copy_token = lane / CHUNKS;
    const int k_token = (lane & 7) + 8 * ((lane >> 3) & 1), v_token = (lane & 7) + 8 * (lane >> 4);
    Lane at;
    at.copy_to = copy_token * ROW_BYTES + swizzle(copy_token, lane % CHUNKS) * 16;
    at.k_from = CHUNKS == 1 ? lane * ROW_BYTES
                            : k_token * ROW_BYTES + swizzle(k_token, lane >> 4) * 16;
    at.v_from = CODES_BYTES + (CHUNKS == 1 ? lane * ROW_BYTES
                                           : v_token * ROW_BYTES +
                                                 swizzle(v_token, (lane >> 3) & 1) * 16);
    at.meta_from = 2 * CODES_BYTES + g * META_BYTES;
    pin(at.copy_to);
    pin(at.k_from);
    pin(at.v_from);
    pin(at.meta_from);

    int next_page = load_page(ahead);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        const u32 row = next_row(next_page);
        ahead += WARPS * TILE;
        next_page = load_page(ahead);
        if (i < count) issue_tile(p, at, ring + i * STAGE_BYTES, row, lane);
        commit();
    }

    float to_half = 0.0f;  // power of two that brings scales of V into fp16's range
    u32 read_stage = ring, write_stage = ring + (STAGES - 1) * STAGE_BYTES;
    int valid = end - begin - warp * TILE;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
        wait<STAGES - 2>();
        __syncwarp();
        {
            const u32 row = next_row(next_page);
            ahead += WARPS * TILE;
            next_page = load_page(ahead);
            if (tile + STAGES - 1 < count) issue_tile(p, at, write_stage, row, lane);
            commit();
        }
        const u32 stage = read_stage;
        write_stage = read_stage;
        read_stage = read_stage == ring + (STAGES - 1) * STAGE_BYTES ? ring
                                                                     : read_stage + STAGE_BYTES;

        // Logits of 32 tokens: rows g and g + 8 of two subtiles, two heads.
        float x[2][4];
#pragma unroll
        for (int sub = 0; sub < 2; ++sub) {
            float dot[NUM_GROUPS][4];
#pragma unroll
            for (int n = 0; n < NUM_GROUPS; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) dot[n][j] = 0.0f;
            if constexpr (CHUNKS == 1) {
                u32 w[4];  // both subtiles at once; only two registers belong to this one
                load_matrix(w, stage + at.k_from);
                const u32 w0 = w[2 * sub], w1 = w[2 * sub + 1], s0 = w0 >> 10, s1 = w1 >> 10;
#pragma unroll
                for (int i = 0; i < MMAS; ++i)
                    mma_half(dot[i / MMAS_PER_GROUP], field(w0, s0, 2 * i), field(w1, s1, 2 * i),
                             field(w0, s0, 2 * i + 1), field(w1, s1, 2 * i + 1), q[i][0], q[i][1]);
            } else {
#pragma unroll
                for (int half = 0; half < CHUNKS / 2; ++half) {
                    u32 w[4], v[4];
                    load_matrix(w, stage + (at.k_from ^ (32 * half)) + 16 * sub * ROW_BYTES);
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[j] = w[j] >> 10;
#pragma unroll
                    for (int f = 0; f < 8; ++f) {
                        const int i = f * (CHUNKS / 2) + half;
                        mma_half(dot[i / MMAS_PER_GROUP], field(w[0], v[0], f),
                                 field(w[1], v[1], f), field(w[2], v[2], f), field(w[3], v[3], f),
                                 q[i][0], q[i][1]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < NUM_GROUPS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 meta =
                        load_shared(stage + at.meta_from + (16 * sub + 8 * r) * META_BYTES + 4 * n);
                    const float scale = half_low(meta), zero = half_high(meta);
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const float y =
                            fmaf(scale, dot[n][2 * r + c], zero * zero_factor[n][c]);
                        x[sub][2 * r + c] = n == 0 ? y : x[sub][2 * r + c] + y;
                    }
                }
        }
        u32 v_meta[2][NUM_GROUPS][2];
#pragma unroll
        for (int sub = 0; sub < 2; ++sub)
#pragma unroll
            for (int n = 0; n < NUM_GROUPS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    v_meta[sub][n][r] = load_shared(stage + at.meta_from +
                                                    (TILE + 16 * sub + 8 * r) * META_BYTES + 4 * n);
        if (valid < TILE) {
#pragma unroll
            for (int sub = 0; sub < 2; ++sub)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (16 * sub + 8 * r + g >= valid) {
                        x[sub][2 * r] = x[sub][2 * r + 1] = NEG_INF;
#pragma unroll
                        for (int n = 0; n < NUM_GROUPS; ++n) v_meta[sub][n][r] = 0;
                    }
        }
        valid -= WARPS * TILE;

        // Maximum and value scale are raised rarely; the common case pays comparisons and a vote.
        float top_scale = SMALLEST_SCALE;
#pragma unroll
        for (int sub = 0; sub < 2; ++sub)
#pragma unroll
            for (int n = 0; n < NUM_GROUPS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    top_scale = fmaxf(top_scale, half_low(v_meta[sub][n][r]));
        float top[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            // A factor is positive, so the maximum may be taken before it is applied.
            top[c] = fmaxf(fmaxf(x[0][c], x[0][c + 2]), fmaxf(x[1][c], x[1][c + 2]));
            top[c] *= logit_factor[c];
        }
        const bool raise = top[0] > s.m[0] + RAISE || top[1] > s.m[1] + RAISE ||
                           top_scale * to_half >= SCALE_LIMIT || to_half == 0.0f;
        if (__any_sync(~0u, raise)) {
            const float warp_scale = over_rows_max(top_scale);
            const int exponent = __float_as_int(warp_scale) & 0x7f800000;
            // 16 / 2^exponent; never larger than before, so earlier probabilities still fit.
            float new_half = __fdividef(16.0f, __int_as_float(exponent));
            if (to_half != 0.0f) new_half = fminf(new_half, to_half);
            const float ratio = to_half == 0.0f ? 1.0f : __fdividef(new_half, to_half);
            to_half = new_half;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float m_new = fmaxf(s.m[c], over_rows_max(top[c]));
                const float alpha = ex2(s.m[c] - m_new);
                s.m[c] = m_new;
                s.l[c] *= alpha;
#pragma unroll
                for (int n = 0; n < NUM_GROUPS; ++n) s.z[n][c] *= alpha;
#pragma unroll
                for (int i = 0; i < MMAS; ++i) {
                    s.acc[i][c] *= alpha * ratio;
                    s.acc[i][c + 2] *= alpha * ratio;
                }
            }
        }

#pragma unroll
        for (int sub = 0; sub < 2; ++sub) {
            float prob[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                prob[j] = ex2(fmaf(x[sub][j], logit_factor[j & 1], -s.m[j & 1]));
                s.l[j & 1] += prob[j];
            }
            u32 b[NUM_GROUPS][2];
#pragma unroll
            for (int n = 0; n < NUM_GROUPS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float scale = half_low(v_meta[sub][n][r]) * to_half;
                    const float zero = half_high(v_meta[sub][n][r]);
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        s.z[n][c] = fmaf(prob[2 * r + c], zero, s.z[n][c]);
                    b[n][r] = transpose(pack_half(prob[2 * r] * scale, prob[2 * r + 1] * scale));
                }
            if constexpr (CHUNKS == 1) {
                u32 w[4];
                load_matrix_trans(w, stage + at.v_from);
                const u32 w0 = w[2 * sub], w1 = w[2 * sub + 1], s0 = w0 >> 10, s1 = w1 >> 10;
#pragma unroll
                for (int i = 0; i < MMAS; ++i) {
                    const int n = i / MMAS_PER_GROUP;
                    mma_half(s.acc[i], field(w0, s0, 2 * i), field(w0, s0, 2 * i + 1),
                             field(w1, s1, 2 * i), field(w1, s1, 2 * i + 1), b[n][0], b[n][1]);
                }
            } else {
#pragma unroll
                for (int half = 0; half < CHUNKS / 2; ++half) {
                    u32 w[4], v[4];
                    load_matrix_trans(w,
                                      stage + (at.v_from ^ (32 * half)) + 16 * sub * ROW_BYTES);
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[j] = w[j] >> 10;
#pragma unroll
                    for (int f = 0; f < 8; ++f) {
                        const int i = f * (CHUNKS / 2) + half, n = i / MMAS_PER_GROUP;
                        mma_half(s.acc[i], field(w[0], v[0], f), field(w[1], v[1], f),
                                 field(w[2], v[2], f), field(w[3], v[3], f), b[n][0], b[n][1]);
                    }
                }
            }
        }
    }
    wait<0>();
    __syncwarp();

    const float back = TWO24 / to_half;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int n = 0; n < NUM_GROUPS; ++n) s.z[n][c] = over_rows_sum(s.z[n][c]);
    }
#pragma unroll
    for (int i = 0; i < MMAS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float w = field_weight((16 * i + 8 * (j >> 1)) / (HEAD_DIM / 8));
            s.acc[i][j] = fmaf(s.acc[i][j], back / w, s.z[i / MMAS_PER_GROUP][j & 1]);
        }
}

// One packed row, dequantized to bf16 in shared memory. The whole warp; lanes take dims.
__device__ __forceinline__ void dequantize_row(u16 *target, const char *codes, const char *meta,
                                               u32 row, int lane) {
    const u16 *words = (const u16 *)(codes + (u64)row * ROW_BYTES);
    const u32 *pairs = (const u32 *)(meta + (u64)row * META_BYTES);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; ++i) {
        const int dim = lane + 32 * i;
        const u32 word = words[dim % (HEAD_DIM / 8)], pair = pairs[dim / GROUP_SIZE];
        const int code = (word >> (2 * (dim / (HEAD_DIM / 8)))) & 3;
        target[dim] = (u16)pack_bf16(fmaf(half_low(pair), (float)code, half_high(pair)), 0.0f);
    }
}

// BF16 tokens of the CTA: the first SINKS positions and those from ring_begin on, 16 per warp and
// step. A first position without a BF16 copy is dequantized into shared memory and read from there.
__device__ __forceinline__ void window_part(const Params &p, State &s, char *scratch, int lane,
                                            int warp, int batch, int kv_head, int first_head,
                                            int split, int splits, int kv_len, int ring_begin) {
    const int g = lane >> 2, t = lane & 3;
    const int num_first = min(kv_len, SINKS), ring_first = max(ring_begin, num_first);
    const int total = num_first + kv_len - ring_first;
    const bool real = first_head + g < GROUP;
    const u16 *q_row = p.q + batch * p.stride_q_batch +
                       (long long)(kv_head * GROUP + first_head + (real ? g : 0)) * p.stride_q_head;
    uint4 q[HEAD_DIM / 32];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; ++j) {
        q[j] = *(const uint4 *)(q_row + 32 * j + 8 * t);
        if (!real) q[j] = make_uint4(0, 0, 0, 0);
    }
    const float factor = p.sm_scale * LOG2E;
    const u64 ring_row = (u64)p.ring_row[batch] * p.num_kv_heads + kv_head;

#pragma unroll 1
    for (int start = (split * WARPS + warp) * 16; start < total; start += splits * WARPS * 16) {
        // Lane l finds the rows of token l % 16.
        const int index = min(start + (lane & 15), total - 1);
        const bool first = index < num_first;
        const int pos = first ? index : index - num_first + ring_first;
        int group = -1;
        if (SINKS > 0 && first) group = p.sink_group[batch * SINKS + index];
        const bool packed = first && group < 0 && pos < ring_begin;
        const u16 *k_row, *v_row;
        if (group >= 0) {
            const u64 offset = (((u64)group * p.num_kv_heads + kv_head) * SINKS + index) * HEAD_DIM;
            k_row = p.sink_k + offset;
            v_row = p.sink_v + offset;
        } else {
            const u64 column = packed ? 0 : pos % max(p.recent_tokens, 1);
            const u64 offset = (ring_row * p.recent_tokens + column) * HEAD_DIM;
            k_row = p.ring_k + offset;
            v_row = p.ring_v + offset;
        }
        u32 missing = __ballot_sync(~0u, packed) & 0xffffu;
        if (missing) {
            u16 *dense = (u16 *)scratch;
            const int page = packed ? p.page_table[batch * p.stride_table + pos / PAGE_SIZE] : 0;
            const u32 row = ((u32)page * p.num_kv_heads + kv_head) * PAGE_SIZE + pos % PAGE_SIZE;
            __syncwarp();
            while (missing) {
                const int token = __ffs(missing) - 1;
                missing &= missing - 1;
                const u32 source = __shfl_sync(~0u, row, token);
                dequantize_row(dense + token * HEAD_DIM, p.k_codes, p.k_meta, source, lane);
                dequantize_row(dense + (16 + token) * HEAD_DIM, p.v_codes, p.v_meta, source, lane);
            }
            __syncwarp();
            if (packed) {
                k_row = dense + (lane & 15) * HEAD_DIM;
                v_row = dense + (16 + (lane & 15)) * HEAD_DIM;
            }
        }

        float raw[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const u16 *k0 = (const u16 *)__shfl_sync(~0u, (u64)k_row, g);
        const u16 *k1 = (const u16 *)__shfl_sync(~0u, (u64)k_row, g + 8);
        const u16 *rows[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            rows[j] = (const u16 *)__shfl_sync(~0u, (u64)v_row, 2 * t + (j & 1) + 8 * (j >> 1));
        uint4 a[HEAD_DIM / 32], b[HEAD_DIM / 32];
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; ++j) {
            a[j] = *(const uint4 *)(k0 + 32 * j + 8 * t);
            b[j] = *(const uint4 *)(k1 + 32 * j + 8 * t);
        }
        uint4 v_first[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v_first[j] = *(const uint4 *)(rows[j] + 8 * g);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; ++j) {
            mma_bf16(raw, a[j].x, b[j].x, a[j].y, b[j].y, q[j].x, q[j].y);
            mma_bf16(raw, a[j].z, b[j].z, a[j].w, b[j].w, q[j].z, q[j].w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            raw[j] *= factor;
            if (start + g + 8 * (j >> 1) >= total) raw[j] = NEG_INF;
        }
        u32 w[2];
        float prob[4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float m_new = fmaxf(s.m[c], over_rows_max(fmaxf(raw[c], raw[c + 2])));
            const float alpha = ex2(s.m[c] - m_new);
            s.m[c] = m_new;
            prob[c] = ex2(raw[c] - m_new);
            prob[c + 2] = ex2(raw[c + 2] - m_new);
            s.l[c] = s.l[c] * alpha + prob[c] + prob[c + 2];
#pragma unroll
            for (int i = 0; i < MMAS; ++i) {
                s.acc[i][c] *= alpha;
                s.acc[i][c + 2] *= alpha;
            }
        }
        w[0] = transpose(pack_bf16(prob[0], prob[1]));
        w[1] = transpose(pack_bf16(prob[2], prob[3]));
        // acc[4h + r] holds dims 64h + 8g + 2r (rows g) and 64h + 8g + 2r + 1 (rows g + 8).
#pragma unroll
        for (int h = 0; h < HEAD_DIM / 64; ++h) {
            uint4 v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = h == 0 ? v_first[j] : *(const uint4 *)(rows[j] + 64 * h + 8 * g);
            const u32 *v0 = &v[0].x, *v1 = &v[1].x, *v2 = &v[2].x, *v3 = &v[3].x;
#pragma unroll
            for (int r = 0; r < 4; ++r)
                mma_bf16(s.acc[4 * h + r], __byte_perm(v0[r], v1[r], 0x5410),
                         __byte_perm(v0[r], v1[r], 0x7632), __byte_perm(v2[r], v3[r], 0x5410),
                         __byte_perm(v2[r], v3[r], 0x7632), w[0], w[1]);
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM == 256 ? 2 : 4)
    decode_gqa(const __grid_constant__ Params p) {
#ifndef KVQUANT_EMULATION
    extern __shared__ __align__(128) char shared[];
#endif
    __shared__ float warp_m[WARPS][HEADS], warp_l[WARPS][HEADS];
    __shared__ bool is_last;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_head = blockIdx.x / HEAD_BLOCKS, first_head = blockIdx.x % HEAD_BLOCKS * HEADS;
    const int batch = blockIdx.y;
    const int heads = min(HEADS, GROUP - first_head);
    const int num_q_heads = p.num_kv_heads * GROUP;

    // The same numbers in every CTA of a request: which splits exist.
    const int kv_len = p.kv_lens[batch], ring_begin = min(p.ring_begin[batch], kv_len);
    const int num_first = min(kv_len, SINKS);
    const int total_window = num_first + kv_len - max(ring_begin, num_first);
    const int used_window =
        min(p.window_splits, (total_window + WINDOW_TOKENS - 1) / WINDOW_TOKENS);
    const int middle = max(ring_begin - SINKS, 0);
    int per_split = max((middle + p.num_splits - 1) / p.num_splits, p.min_split_tokens);
    per_split = (per_split + CTA_TOKENS - 1) / CTA_TOKENS * CTA_TOKENS;
    const int used_packed = middle == 0 ? 0 : (middle + per_split - 1) / per_split;
    const int used = used_packed + used_window;
    const long long out_row = (long long)batch * num_q_heads + kv_head * GROUP + first_head;

    // Long CTAs start first; the short ones of the windows fill what they leave.
    const bool is_window = blockIdx.z >= p.num_splits;
    const int split = is_window ? blockIdx.z - p.num_splits : blockIdx.z;
    if (split >= (is_window ? used_window : used_packed)) {
        if (used == 0 && blockIdx.z == 0) {
            for (int i = threadIdx.x; i < heads * HEAD_DIM; i += THREADS)
                p.out[out_row * HEAD_DIM + i] = 0;
            if (threadIdx.x < heads) p.lse[out_row + threadIdx.x] = NEG_INF;
        }
        return;
    }
    const int part = is_window ? used_packed + split : split;

    State s;
    reset(s);
    char *scratch = shared + warp * WARP_BYTES;
    if (is_window) {
        window_part(p, s, scratch, lane, warp, batch, kv_head, first_head, split, used_window,
                    kv_len, ring_begin);
    } else {
        const int begin = SINKS + split * per_split;
        packed_part(p, s, (u32)__cvta_generic_to_shared(scratch), lane, warp, batch, kv_head,
                    first_head, begin, min(begin + per_split, ring_begin));
    }

    // Merge of the four warps.
    const int g = lane >> 2, t = lane & 3;
    float *mine = (float *)scratch;  // [HEADS, HEAD_DIM]
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        s.l[c] = over_rows_sum(s.l[c]);
        if (g == 0) {
            warp_m[warp][2 * t + c] = s.m[c];
            warp_l[warp][2 * t + c] = s.l[c];
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MMAS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int dim = is_window ? 64 * (i / 4) + 8 * g + 2 * (i % 4) + (j >> 1)
                                      : 16 * i + 8 * (j >> 1) + g;
            mine[(2 * t + (j & 1)) * HEAD_DIM + dim] = s.acc[i][j];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        float top = NEG_INF, sum = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_m[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = ex2(warp_m[w][head] - top);
            sum += weight * warp_l[w][head];
            value += weight * ((float *)(shared + w * WARP_BYTES))[i];
        }
        value /= sum;
        const float lse = top + lg2(sum);
        if (used == 1) {
            p.out[out_row * HEAD_DIM + i] = (u16)pack_bf16(value, 0.0f);
            if (dim == 0) p.lse[out_row + head] = lse * LN2;
        } else {
            const long long row = (out_row + head) * (p.num_splits + p.window_splits) + part;
            p.o_parts[row * HEAD_DIM + dim] = value;
            if (dim == 0) p.lse_parts[row] = lse;
        }
    }
    if (used == 1) return;

    // The last CTA of this (request, KV head, head block) merges the partial results.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        is_last = atomicInc(p.counters + batch * gridDim.x + blockIdx.x, used - 1) == used - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int num_parts = p.num_splits + p.window_splits;
    float *weights = (float *)shared;  // [heads, used]
    for (int head = warp; head < heads; head += WARPS) {
        const float *lse = p.lse_parts + (out_row + head) * num_parts;
        float top = NEG_INF, sum = 0.0f;
        for (int i = lane; i < used; i += 32) top = fmaxf(top, __ldcg(lse + i));
#pragma unroll
        for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        for (int i = lane; i < used; i += 32) {
            const float weight = ex2(__ldcg(lse + i) - top);
            weights[head * used + i] = weight;
            sum += weight;
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane == 0) {
            warp_l[0][head] = sum;
            p.lse[out_row + head] = (top + lg2(sum)) * LN2;
        }
    }
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < heads * HEAD_DIM; i += 4 * THREADS) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        const float *row = p.o_parts + (out_row + head) * num_parts * HEAD_DIM + dim;
        const float *weight = weights + head * used;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 16
        for (int n = 0; n < used; ++n) {
            const float4 o = __ldcg((const float4 *)(row + n * HEAD_DIM));
            sum.x = fmaf(weight[n], o.x, sum.x);
            sum.y = fmaf(weight[n], o.y, sum.y);
            sum.z = fmaf(weight[n], o.z, sum.z);
            sum.w = fmaf(weight[n], o.w, sum.w);
        }
        const float norm = 1.0f / warp_l[0][head];
        uint2 packed = make_uint2(pack_bf16(sum.x * norm, sum.y * norm),
                                  pack_bf16(sum.z * norm, sum.w * norm));
        *(uint2 *)(p.out + out_row * HEAD_DIM + i) = packed;
    }
}
