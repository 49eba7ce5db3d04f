// Fold and verify of one ReplaySSM step for K = V = 128 and bfloat16 rows; see fold_verify.py.
//
// One block of threads serves BV = 16 * WARPS value rows of one value head of one request, each warp
// 16 of them with all 128 columns of the state in registers from the first load to the last store.
// Rows j = 0 .. J - 1 are the P pending rows and then the T new ones, at ring row (base + j) mod R,
// in blocks of 16. With S the state at `base`, G_j = g_0 + .. + g_j and D_ij = exp(G_i - G_j):
//
//   u_j = v_j - exp(G_j) S k_j                                 what row j would add to an empty past
//   d_b = M_b (u_b - sum_{c < b} C_bc d_c)                     what it does add, block by block
//   o_t = exp(G) S q_t + sum_b B_tb d_b                        outputs of the new rows
//   S'  = exp(G_{P-1}) S + sum_{j < P} exp(G_{P-1} - G_j) d_j k_j^T         the fold
//
//   L_b = tril(diag(beta) (K_b K_b^T o D), -1),  M_b = (I + L_b)^-1 diag(beta)
//   C_bc = K_b K_c^T o D,  B_tb = (Q_t K_b^T o D) where row j is not after row P + t
//
// so every product with the state is one with the state at `base`: it is read once, written once.
// k and q stand for the rows after l2norm; the code multiplies the raw rows, which are exact in
// bfloat16, and puts the norms on the small results. What meets them is split into three bfloat16
// pieces, which hold all 24 bits of a float.
//
// Compiled by NVRTC with: NB, NQ (blocks of rows and of new rows at most), WARPS, CTAS (blocks a
// multiprocessor should hold), STATE_T, WEIGHT_T (float or bf16), PDL. Includes nothing, so that no
// header has to be found where it runs.

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;

#define THREADS (WARPS * 32)
#define BV (WARPS * 16)
#define DIM 128
#define ROW 136        // elements of a staged row: 16 bytes more, so that ldmatrix meets no conflict
#define VROW (BV + 8)
#define TILE 16        // rows of a block
#define PIECE 64       // uint2 of one bfloat16 piece of a 16x16 tile
#define TILES (NB + NB * (NB - 1) / 2 + NQ * NB)
#define LSTRIDE 20     // floats of a row of L^T: keeps 16-byte loads aligned

struct Args {
    STATE_T* state;
    const bf16* k_ring;
    const bf16* v_ring;
    const bf16* a_ring;
    const bf16* b_ring;
    const bf16* q;
    bf16* out;
    const WEIGHT_T* A_log;
    const WEIGHT_T* dt_bias;
    const int* slot;
    const int* base;
    const int* start;
    const int* row_start;
    long long state_stride, k_stride, v_stride, a_stride, b_stride;  // elements from slot to slot
    long long q_stride, out_stride;                                  // from row to row
    int ring, key_heads, value_heads, max_rows;
    float scale;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

// Left operand of a 16x16 product in three pieces.
struct Pieces { u32 h[4], m[4], l[4]; };

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Three bfloat16 pieces of two floats; what is left after each is exact.
__device__ __forceinline__ void split(float x, float y, u32& h, u32& m, u32& l) {
    h = pack(x, y);
    x -= __uint_as_float(h << 16);
    y -= __uint_as_float(h & 0xffff0000u);
    m = pack(x, y);
    x -= __uint_as_float(m << 16);
    y -= __uint_as_float(m & 0xffff0000u);
    l = pack(x, y);
}

__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix(u32* r, const void* p) {
    u32 address = (u32)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(u32* r, const void* p) {
    u32 address = (u32)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The accumulators x[2][4] of a 16x16 product as the left operand of the next one, in pieces.
__device__ __forceinline__ void split_tile(const float (*x)[4], Pieces& p) {
    split(x[0][0], x[0][1], p.h[0], p.m[0], p.l[0]);
    split(x[0][2], x[0][3], p.h[1], p.m[1], p.l[1]);
    split(x[1][0], x[1][1], p.h[2], p.m[2], p.l[2]);
    split(x[1][2], x[1][3], p.h[3], p.m[3], p.l[3]);
}

// The accumulators of a 16x16 tile T[i][j] are, lane by lane, its right operand in x T^T.
__device__ __forceinline__ void store_tile(uint4* tile, int lane, const float (*x)[4]) {
    uint4 h, m, l;
    split(x[0][0], x[0][1], h.x, m.x, l.x);
    split(x[1][0], x[1][1], h.y, m.y, l.y);
    split(x[0][2], x[0][3], h.z, m.z, l.z);
    split(x[1][2], x[1][3], h.w, m.w, l.w);
    tile[lane] = h;
    tile[32 + lane] = m;
    tile[64 + lane] = l;
}

// c[2][4] += x T^T at float accuracy: all products of pieces that reach 2^-24, small ones first.
__device__ __forceinline__ void multiply(float (*c)[4], const Pieces& x, const uint4* tile, int lane) {
    const uint4 h = tile[lane], m = tile[32 + lane], l = tile[64 + lane];
    mma(c[0], x.l, h.x, h.y); mma(c[1], x.l, h.z, h.w);
    mma(c[0], x.h, l.x, l.y); mma(c[1], x.h, l.z, l.w);
    mma(c[0], x.m, m.x, m.y); mma(c[1], x.m, m.z, m.w);
    mma(c[0], x.m, h.x, h.y); mma(c[1], x.m, h.z, h.w);
    mma(c[0], x.h, m.x, m.y); mma(c[1], x.h, m.z, m.w);
    mma(c[0], x.h, h.x, h.y); mma(c[1], x.h, h.z, h.w);
}

__device__ __forceinline__ float4 load4(const float* p) { return __ldcs((const float4*)p); }
__device__ __forceinline__ float4 load4(const bf16* p) {
    const uint2 w = __ldcs((const uint2*)p);
    return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                       __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
}
__device__ __forceinline__ void store4(float* p, float4 x) { __stcs((float4*)p, x); }
__device__ __forceinline__ void store4(bf16* p, float4 x) {
    __stcs((uint2*)p, make_uint2(pack(x.x, x.y), pack(x.z, x.w)));
}

__device__ __forceinline__ float square_sum(uint4 w) {
    float total = 0.f;
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float x = __uint_as_float(words[i] << 16), y = __uint_as_float(words[i] & 0xffff0000u);
        total = fmaf(x, x, fmaf(y, y, total));
    }
    return total;
}

struct Shared {
    __align__(16) bf16 k[NB * TILE][ROW];
    __align__(16) bf16 q[NQ * TILE][ROW];
    __align__(16) bf16 v[NB * TILE][VROW];   // later the outputs
    uint4 tiles[TILES][96];                  // M_b, then -C_bc, then B_tb: three pieces each
    float lower[NB][TILE * LSTRIDE];         // L_b transposed
    double sum[NB * TILE];                   // G_j / ln 2
    float beta[NB * TILE];
    float k_norm[NB * TILE], q_norm[NQ * TILE];
    float k_read[NB * TILE], q_read[NQ * TILE], kept[NB * TILE];
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) fold_verify(const __grid_constant__ Args p) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int slice = blockIdx.x, head = blockIdx.y, request = blockIdx.z;
    const int key_head = head / (p.value_heads / p.key_heads);
    const int first = p.row_start[request], T = p.row_start[request + 1] - first;
    const long long slot = p.slot[request];
    if (T == 0) return;
    bf16* out = p.out + first * p.out_stride + head * DIM + slice * BV;
    if (slot == 0) {
        for (int i = tid; i < T * (BV / 8); i += THREADS)
            *(uint4*)(out + (i / (BV / 8)) * p.out_stride + (i % (BV / 8)) * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    if (T > p.max_rows) return;
    const int base = p.base[request], P = p.start[request] - base, J = P + T;
    if (base < 0 || P < 0 || J > NB * TILE || T > NQ * TILE || J > p.ring) {
        // No answer is better than a wrong one that looks right.
        for (int i = tid; i < T * (BV / 8); i += THREADS)
            *(uint4*)(out + (i / (BV / 8)) * p.out_stride + (i % (BV / 8)) * 8) =
                make_uint4(~0u, ~0u, ~0u, ~0u);
        return;
    }
    const int nb = (J + TILE - 1) / TILE, nq = (T + TILE - 1) / TILE, nf = (P + TILE - 1) / TILE;
    const int g = lane >> 2, t = lane & 3;

    // Column 16 c + 4 t + e of the state plays column 2 t + (e & 1) + 8 (e >> 1) of product step c,
    // so that a thread loads 16 bytes at once; staged rows are permuted the same way.
    STATE_T* state = p.state + slot * p.state_stride +
                     ((long long)head * DIM + slice * BV + warp * 16 + g) * DIM + t * 4;
    float4 s[8][2];

    if (PDL) {
        if (base > 0) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                s[c][0] = load4(state + c * 16);
                s[c][1] = load4(state + c * 16 + 8 * DIM);
            }
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }

    {   // Stage the rows; a row is 16 pieces of 16 bytes.
        const int chunk = tid & 15;
        const bf16* k_ring = p.k_ring + slot * p.k_stride + key_head * DIM + chunk * 8;
        const bf16* q = p.q + first * p.q_stride + key_head * DIM + chunk * 8;
        uint4 k_words[NB * TILE * 16 / THREADS], q_words[NQ * TILE * 16 / THREADS];
        uint4 v_words[NB];
#pragma unroll
        for (int i = 0; i < NB * TILE * 16 / THREADS; ++i) {
            const int j = i * (THREADS / 16) + (tid >> 4);
            k_words[i] = make_uint4(0, 0, 0, 0);
            if (j < J)
                k_words[i] = *(const uint4*)(k_ring + (long long)((u32)(base + j) % (u32)p.ring) *
                                                          p.key_heads * DIM);
        }
#pragma unroll
        for (int i = 0; i < NQ * TILE * 16 / THREADS; ++i) {
            const int j = i * (THREADS / 16) + (tid >> 4);
            q_words[i] = make_uint4(0, 0, 0, 0);
            if (j < T) q_words[i] = *(const uint4*)(q + j * p.q_stride);
        }
#pragma unroll
        for (int b = 0; b < NB; ++b) {
            const int j = b * TILE + tid / (BV / 8), column = tid % (BV / 8);
            v_words[b] = make_uint4(0, 0, 0, 0);
            if (j < J)
                v_words[b] = *(const uint4*)(p.v_ring + slot * p.v_stride +
                    ((long long)((u32)(base + j) % (u32)p.ring) * p.value_heads + head) * DIM +
                    slice * BV + column * 8);
        }
        if (warp == 0) {
            // Gates: a lane takes rows 2 l and 2 l + 1. The sums are double so that their
            // differences keep the small gates that follow a large one.
            const float rate = -1.4426950408889634f * expf(to_float(p.A_log[head]));
            const float bias = to_float(p.dt_bias[head]);
            double g2[2] = {0., 0.};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 2 * lane + e;
                if (j < J) {
                    const long long row = (long long)((u32)(base + j) % (u32)p.ring) * p.value_heads + head;
                    const float x = to_float(p.a_ring[slot * p.a_stride + row]) + bias;
                    const float y = to_float(p.b_ring[slot * p.b_stride + row]);
                    g2[e] = rate * (x > 20.f ? x : log1pf(expf(x)));
                    sh.beta[j] = 1.f / (1.f + expf(-y));
                } else if (j < NB * TILE) {
                    sh.beta[j] = 0.f;
                }
            }
            double total = g2[0] + g2[1];
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const double other = __shfl_up_sync(~0u, total, d);
                if (lane >= d) total += other;
            }
            if (2 * lane < NB * TILE) {
                sh.sum[2 * lane] = total - g2[1];
                sh.sum[2 * lane + 1] = total;
            }
        }
        if (!PDL && base > 0) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                s[c][0] = load4(state + c * 16);
                s[c][1] = load4(state + c * 16 + 8 * DIM);
            }
        }
        if (base == 0) {
#pragma unroll
            for (int c = 0; c < 8; ++c) s[c][0] = s[c][1] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
        const int column = (chunk >> 1) * 16 + (chunk & 1) * 4;
#pragma unroll
        for (int i = 0; i < NB * TILE * 16 / THREADS; ++i) {
            const int j = i * (THREADS / 16) + (tid >> 4);
            const uint4 w = k_words[i];
            *(uint2*)&sh.k[j][column] = make_uint2(w.x, w.z);
            *(uint2*)&sh.k[j][column + 8] = make_uint2(w.y, w.w);
            float total = square_sum(w);
#pragma unroll
            for (int d = 1; d < 16; d *= 2) total += __shfl_xor_sync(~0u, total, d);
            if (chunk == 0) sh.k_norm[j] = rsqrtf(total + 1e-6f);
        }
#pragma unroll
        for (int i = 0; i < NQ * TILE * 16 / THREADS; ++i) {
            const int j = i * (THREADS / 16) + (tid >> 4);
            const uint4 w = q_words[i];
            *(uint2*)&sh.q[j][column] = make_uint2(w.x, w.z);
            *(uint2*)&sh.q[j][column + 8] = make_uint2(w.y, w.w);
            float total = square_sum(w);
#pragma unroll
            for (int d = 1; d < 16; d *= 2) total += __shfl_xor_sync(~0u, total, d);
            if (chunk == 0) sh.q_norm[j] = rsqrtf(total + 1e-6f) * p.scale;
        }
#pragma unroll
        for (int b = 0; b < NB; ++b)
            *(uint4*)&sh.v[b * TILE + tid / (BV / 8)][(tid % (BV / 8)) * 8] = v_words[b];
    }
    __syncthreads();

    const int matrix = lane >> 3, within = lane & 7;
    const int row_n = within + (matrix >> 1) * 8, column_n = (matrix & 1) * 8;   // rows as they lie
    const int row_t = within + (matrix & 1) * 8, column_t = (matrix >> 1) * 8;   // transposed

    // 16x16 products of rows, one a warp: K_b K_c^T for c <= b, then Q_t K_b^T.
    {
        int index = 0;
#pragma unroll
        for (int b = 0; b < NB + NQ; ++b) {
#pragma unroll
            for (int c = 0; c < NB; ++c) {
                const bool query = b >= NB;
                if (!query && c > b) continue;
                const int mine = index++;
                if (mine % WARPS != warp || c >= nb || (query ? b - NB >= nq : b >= nb)) continue;
                float x[2][4] = {};
#pragma unroll
                for (int step = 0; step < 8; ++step) {
                    u32 left[4], right[4];
                    const bf16(*rows)[ROW] = query ? &sh.q[(b - NB) * TILE] : &sh.k[b * TILE];
                    ldmatrix(left, &rows[row_n][step * 16 + column_n]);
                    ldmatrix(right, &sh.k[c * TILE + row_n][step * 16 + column_n]);
                    const u32 a[4] = {left[0], left[2], left[1], left[3]};
                    mma(x[0], a, right[0], right[1]);
                    mma(x[1], a, right[2], right[3]);
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int i = g + (e >> 1) * 8, j = c * TILE + n * 8 + 2 * t + (e & 1);
                        const int row = query ? P + (b - NB) * TILE + i : b * TILE + i;
                        const bool seen = query ? (j <= row && row < J) : j < row;
                        float weight = 0.f;
                        if (seen) {
                            weight = exp2f((float)(sh.sum[row] - sh.sum[j])) * sh.k_norm[j];
                            weight *= query ? sh.q_norm[(b - NB) * TILE + i] : sh.k_norm[row];
                        }
                        x[n][e] *= weight;
                        if (!query && c == b)
                            sh.lower[b][(j - c * TILE) * LSTRIDE + i] = x[n][e] * sh.beta[row];
                        else if (!query)
                            x[n][e] = -x[n][e];
                    }
                }
                if (query || c != b)
                    store_tile(sh.tiles[query ? NB + NB * (NB - 1) / 2 + (b - NB) * NB + c
                                              : NB + b * (b - 1) / 2 + c], lane, x);
            }
        }
        if (tid < nb * TILE) {
            sh.k_read[tid] = exp2f((float)sh.sum[tid]) * sh.k_norm[tid];
            sh.kept[tid] = tid < P ? exp2f((float)(sh.sum[P - 1] - sh.sum[tid])) * sh.k_norm[tid] : 0.f;
        }
        if (tid < nq * TILE)
            sh.q_read[tid] = tid < T ? exp2f((float)sh.sum[P + tid]) * sh.q_norm[tid] : 0.f;
    }
    __syncthreads();

    if (warp < (NB + 1) / 2) {
        // A lane solves for one column of (I + L_b)^-1; the other warps go on to the state.
        const int b = warp * 2 + (lane >> 4), column = lane & 15;
        if (b < nb) {
            float x[TILE];
#pragma unroll
            for (int i = 0; i < TILE; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
            for (int j = 0; j < TILE - 1; ++j) {
#pragma unroll
                for (int i4 = (j + 1) / 4; i4 < 4; ++i4) {
                    const float4 l = *(const float4*)&sh.lower[b][j * LSTRIDE + i4 * 4];
                    if (i4 * 4 + 0 > j) x[i4 * 4 + 0] = fmaf(-l.x, x[j], x[i4 * 4 + 0]);
                    if (i4 * 4 + 1 > j) x[i4 * 4 + 1] = fmaf(-l.y, x[j], x[i4 * 4 + 1]);
                    if (i4 * 4 + 2 > j) x[i4 * 4 + 2] = fmaf(-l.z, x[j], x[i4 * 4 + 2]);
                    if (i4 * 4 + 3 > j) x[i4 * 4 + 3] = fmaf(-l.w, x[j], x[i4 * 4 + 3]);
                }
            }
            const float beta = sh.beta[b * TILE + column];
            unsigned short* tile = (unsigned short*)sh.tiles[b];
#pragma unroll
            for (int i = 0; i < TILE; ++i) {
                const int at = ((i & 7) * 4 + ((column & 7) >> 1)) * 8 +
                               ((i >> 3) * 2 + (column >> 3)) * 2 + (column & 1);
                u32 h, m, l;
                split(x[i] * beta, 0.f, h, m, l);
                tile[at] = h;
                tile[256 + at] = m;
                tile[512 + at] = l;
            }
        }
    }

    // Every row against the state.
    float x[NB][2][4] = {}, y[NQ][2][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        Pieces a;
        split(s[step][0].x, s[step][0].y, a.h[0], a.m[0], a.l[0]);
        split(s[step][1].x, s[step][1].y, a.h[1], a.m[1], a.l[1]);
        split(s[step][0].z, s[step][0].w, a.h[2], a.m[2], a.l[2]);
        split(s[step][1].z, s[step][1].w, a.h[3], a.m[3], a.l[3]);
#pragma unroll
        for (int b = 0; b < NB + NQ; ++b) {
            if (b < NB ? b >= nb : b - NB >= nq) continue;
            u32 right[4];
            ldmatrix(right, b < NB ? &sh.k[b * TILE + row_n][step * 16 + column_n]
                                   : &sh.q[(b - NB) * TILE + row_n][step * 16 + column_n]);
            float(*c)[4] = b < NB ? x[b] : y[b - NB];
            mma(c[0], a.l, right[0], right[1]); mma(c[1], a.l, right[2], right[3]);
            mma(c[0], a.m, right[0], right[1]); mma(c[1], a.m, right[2], right[3]);
            mma(c[0], a.h, right[0], right[1]); mma(c[1], a.h, right[2], right[3]);
        }
    }
    __syncthreads();

    // Corrections among the rows, and the outputs.
#pragma unroll
    for (int q = 0; q < NQ; ++q)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) y[q][n][e] *= sh.q_read[q * TILE + n * 8 + 2 * t + (e & 1)];
    Pieces past[NB];
#pragma unroll
    for (int b = 0; b < NB; ++b) {
        if (b >= nb) continue;
        u32 v[4];
        ldmatrix_trans(v, &sh.v[b * TILE + within + (matrix >> 1) * 8][warp * 16 + (matrix & 1) * 8]);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 word = v[n * 2 + (e >> 1)];
                x[b][n][e] = __uint_as_float(e & 1 ? word & 0xffff0000u : word << 16) -
                             x[b][n][e] * sh.k_read[b * TILE + n * 8 + 2 * t + (e & 1)];
            }
#pragma unroll
        for (int c = 0; c < b; ++c) multiply(x[b], past[c], sh.tiles[NB + b * (b - 1) / 2 + c], lane);
        Pieces u;
        split_tile(x[b], u);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[b][n][e] = 0.f;
        multiply(x[b], u, sh.tiles[b], lane);
        split_tile(x[b], past[b]);
#pragma unroll
        for (int q = 0; q < NQ; ++q)
            if (q < nq) multiply(y[q], past[b], sh.tiles[NB + NB * (NB - 1) / 2 + q * NB + b], lane);
    }

    // The fold: d_j scaled to its weight in the new state, times the raw rows.
    if (P > 0) {
        const float carried = exp2f((float)sh.sum[P - 1]);
#pragma unroll
        for (int b = 0; b < NB; ++b) {
            if (b >= nf) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[b][n][e] *= sh.kept[b * TILE + n * 8 + 2 * t + (e & 1)];
            split_tile(x[b], past[b]);
        }
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            float c[2][4] = {{s[step][0].x, s[step][0].y, s[step][1].x, s[step][1].y},
                             {s[step][0].z, s[step][0].w, s[step][1].z, s[step][1].w}};
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[n][e] *= carried;
#pragma unroll
            for (int b = 0; b < NB; ++b) {
                if (b >= nf) continue;
                u32 right[4];
                ldmatrix_trans(right, &sh.k[b * TILE + row_t][step * 16 + column_t]);
                mma(c[0], past[b].l, right[0], right[1]); mma(c[1], past[b].l, right[2], right[3]);
                mma(c[0], past[b].m, right[0], right[1]); mma(c[1], past[b].m, right[2], right[3]);
                mma(c[0], past[b].h, right[0], right[1]); mma(c[1], past[b].h, right[2], right[3]);
            }
            store4(state + step * 16, make_float4(c[0][0], c[0][1], c[1][0], c[1][1]));
            store4(state + step * 16 + 8 * DIM, make_float4(c[0][2], c[0][3], c[1][2], c[1][3]));
        }
    }

    // Outputs [T, V] through the warp's own columns of the staged values, 16 bytes a lane.
#pragma unroll
    for (int q = 0; q < NQ; ++q) {
        if (q >= nq) continue;
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sh.v[n * 8 + 2 * t + (e & 1)][warp * 16 + g + (e >> 1) * 8] =
                    (bf16)pack(y[q][n][e], 0.f);
        __syncwarp();
        const int row = lane >> 1, column = warp * 16 + (lane & 1) * 8;
        if (q * TILE + row < T)
            *(uint4*)(out + (q * TILE + row) * p.out_stride + column) = *(const uint4*)&sh.v[row][column];
    }
}
