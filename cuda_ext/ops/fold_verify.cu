// Fold and verify of one ReplaySSM step for K = V = 128 and bfloat16 rows; see fold_verify.py.
//
// One block of threads serves BV = 16 * WARPS value rows of one value head of one request, each
// warp 16 of them with all 128 columns of the state on chip from the one load to the one store.
// Rows j = 0 .. J - 1 are the P pending rows and then the T new ones, at ring row (base + j) mod R,
// in blocks of 16. With S the state at `base`, k and q the raw rows, r their l2norm factors, G_j =
// g_0 + .. + g_j, D_ij = exp(G_i - G_j) for j <= i, and d_j scaled by r_j throughout:
//
//   u_j = v_j - r_j (exp(G_j) S k_j + sum_{c < b} C_bc d_c)         C_bc = K_b K_c^T o D
//   d_b = M_b u_b         M_b = diag(r) (I + L_b)^-1 diag(beta),    L_b = diag(beta r) C_bb diag(r)
//                                                                   strictly below the diagonal
//   o_t = r_t (exp(G) S q_t + sum_b B_tb d_b)                       B_tb = Q_t K_b^T o D, row j not
//                                                                   after row P + t
//   S'  = exp(G_{P-1}) S + sum_{j < P} exp(G_{P-1} - G_j) d_j k_j^T
//
// so every product with the state is one with the state at `base`: it is read once, written once.
// The raw rows are exact in bfloat16. What meets them is split into three bfloat16 pieces, which
// hold all 24 bits of a float.
//
// A block of threads goes through several tiles of work. While one is computed, part of the state
// of the next is on its way to shared memory, each thread's share to a place of its own, so that no
// barrier is needed for it. The rest stays in shared memory throughout, for want of registers.
//
// Compiled by NVRTC with: NB, NQ (blocks of rows and of new rows at most), WARPS, CTAS (blocks of
// threads that a multiprocessor should hold), AHEAD (of the 16 loads of a thread's share of the
// state, those that are made a tile ahead and then held in registers), KEY_HEADS, VALUE_HEADS, RING
// (H, HV, R), STATE_T, RATE_T, BIAS_T (float or bf16), PDL (start before the previous launch
// has ended), SHARED_BYTES. Includes nothing, so that no header has to be found where it runs.

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;

#define THREADS (WARPS * 32)
#define BV (WARPS * 16)
#define DIM 128
#define SLICES (DIM / BV)  // tiles of a value head
#define ROW 136  // elements of a staged row: 16 bytes more, so that ldmatrix meets no conflict
#define VROW (BV + 8)
#define TILE 16  // rows of a block
#define TILES (NB + NB * (NB - 1) / 2 + NQ * NB)
#define LSTRIDE 20                        // floats of a row of L^T: keeps 16-byte loads aligned
#define EARLY (WARPS >= 4 * NB ? NB : 0)  // warps that meet the state before the solves

struct Args {
    STATE_T* state;
    const bf16* k_ring;
    const bf16* v_ring;
    const bf16* a_ring;
    const bf16* b_ring;
    const bf16* q;
    bf16* out;
    const RATE_T* A_log;
    const BIAS_T* dt_bias;
    const int* slot;
    const int* base;
    const int* start;
    const int* row_start;
    long long state_stride, k_stride, v_stride, a_stride, b_stride;  // elements from slot to slot
    long long q_stride, out_stride;                                  // from row to row
    int max_rows, tiles;
    float scale;
};

// The request of a tile.
struct Work {
    int first, T, base, P;
    long long slot;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

// Left operand of a 16x16 product in three pieces.
struct Pieces {
    u32 h[4], m[4], l[4];

    // The smallest first.
    __device__ __forceinline__ const u32* operator[](int i) const {
        return i == 0 ? l : i == 1 ? m : h;
    }
};

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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[2][4] += a b^T for 16 rows of b as ldmatrix gives them.
__device__ __forceinline__ void mma_rows(float (*c)[4], const u32* a, const u32* b) {
    mma(c[0], a, b[0], b[1]);
    mma(c[1], a, b[2], b[3]);
}

// x[n][e] of a lane is row g + 8 (e >> 1) and this column of a 16x16 product, with g = lane / 4 and
// t = lane % 4.
__device__ __forceinline__ int column_of(int n, int e, int t) { return n * 8 + 2 * t + (e & 1); }

// Each column of a 16x16 product times its factor.
__device__ __forceinline__ void scale_columns(float (*x)[4], const float* factors, int t) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] *= factors[column_of(n, e, t)];
}

__device__ __forceinline__ void ldmatrix(u32* r, const void* p) {
    u32 address = (u32)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(u32* r, const void* p) {
    u32 address = (u32)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
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

// c[2][4] += x T^T at float accuracy: all products of pieces that reach 2^-24. Two chains, for a
// product waits for the one before it on the same accumulators.
__device__ __forceinline__ void multiply(float (*c)[4], const Pieces& x, const uint4* tile,
                                         int lane) {
    u32 h[4], m[4], l[4];
    *(uint4*)h = tile[lane];
    *(uint4*)m = tile[32 + lane];
    *(uint4*)l = tile[64 + lane];
    float small[2][4] = {};
    mma_rows(small, x.l, h);
    mma_rows(c, x.m, h);
    mma_rows(small, x.h, l);
    mma_rows(c, x.h, m);
    mma_rows(small, x.m, m);
    mma_rows(c, x.h, h);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] += small[n][e];
}

__device__ __forceinline__ float4 widen(uint2 w) {
    return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                       __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
}
__device__ __forceinline__ float4 to_float4(const float* p) { return *(const float4*)p; }
__device__ __forceinline__ float4 to_float4(const bf16* p) { return widen(*(const uint2*)p); }
__device__ __forceinline__ void store4(float* p, float4 x) { __stcs((float4*)p, x); }
__device__ __forceinline__ void store4(bf16* p, float4 x) {
    __stcs((uint2*)p, make_uint2(pack(x.x, x.y), pack(x.z, x.w)));
}

// Copies from global to shared memory that occupy no register; nothing read where `there` is false,
// and zeros written.
__device__ __forceinline__ void copy4(void* to, const void* from, bool there) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(there ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy8(void* to, const void* from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ float2 to_pair(double x) {
    const float high = (float)x;
    return make_float2(high, (float)(x - high));
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp of the difference of two sums of gates, without the digits that their size would cost.
__device__ __forceinline__ float decay(float2 to, float2 from) {
    return power_of_two((to.x - from.x) + (to.y - from.y));
}

struct Shared {
    struct __align__(4 * sizeof(STATE_T)) {
        STATE_T x[4];
    } share[16][THREADS];
    int work[2][8];  // row_start of a tile's request and of the next, base, start, slot
    __align__(16) bf16 k[NB * TILE][ROW];
    __align__(16) bf16 q[NQ * TILE][ROW];
    __align__(16) bf16 v[NB * TILE][VROW];  // later the outputs
    uint4 tiles[TILES][96];                 // M_b, then C_bc, then B_tb: three pieces each
    float lower[NB][TILE * LSTRIDE];        // C_bb transposed, then M_b
    float2 sum[NB * TILE];                  // G_j / ln 2 as a float and what it lacks
    float beta[NB * TILE];
    float k_norm[NB * TILE], q_norm[NQ * TILE];
    float since[NB * TILE], kept[NB * TILE];  // exp(G_j), exp(G_{P-1} - G_j)
    float q_since[NQ * TILE];
};

static_assert(sizeof(Shared) == SHARED_BYTES, "fold_verify.py counts other bytes");

__device__ __forceinline__ Work find_work(const Args& p, int tile) {
    const int request = tile / (VALUE_HEADS * SLICES);
    Work work;
    work.first = p.row_start[request];
    work.T = p.row_start[request + 1] - work.first;
    work.base = p.base[request];
    work.P = p.start[request] - work.base;
    work.slot = p.slot[request];
    return work;
}

// The same numbers, a lane of the first warp each, to shared memory; nobody waits for them.
__device__ __forceinline__ void copy_work(const Args& p, int tile, int* to) {
    const int i = threadIdx.x, request = tile / (VALUE_HEADS * SLICES);
    const int* from = i < 2 ? p.row_start + i : i == 2 ? p.base : i == 3 ? p.start : p.slot;
    if (i < 5) copy4(to + i, from + request, true);
}

__device__ __forceinline__ Work read_work(const int* from) {
    Work work;
    work.first = from[0];
    work.T = from[1] - from[0];
    work.base = from[2];
    work.P = from[3] - from[2];
    work.slot = from[4];
    return work;
}

__device__ __forceinline__ bool is_ours(const Args& p, const Work& w) {
    return w.T > 0 && w.T <= p.max_rows && w.slot != 0;
}

__device__ __forceinline__ bool can_be_right(const Args& p, const Work& w) {
    return w.base >= 0 && w.P >= 0 && w.T <= NQ * TILE && w.P + w.T <= min(NB * TILE, RING);
}

// Where a thread's share of a tile's state begins. Column 16 c + 4 t + e plays column 2 t + (e & 1)
// + 8 (e >> 1) of product step c, so that a thread loads 16 bytes at once; the words of a staged
// row are permuted the same way.
__device__ __forceinline__ STATE_T* share_of(const Args& p, const Work& w, int tile) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rows = tile % (VALUE_HEADS * SLICES) * BV + warp * 16 + (lane >> 2);
    return p.state + w.slot * p.state_stride + (long long)rows * DIM + (lane & 3) * 4;
}

// Load i of a share: rows g and g + 8 of 16 columns in turn.
__device__ __forceinline__ int load_offset(int i) { return (i >> 1) * 16 + (i & 1) * 8 * DIM; }

__device__ __forceinline__ void load_share(const Args& p, Shared& sh, const Work& w, int tile,
                                           int from, int to) {
    const STATE_T* share = share_of(p, w, tile);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (i < from || i >= to) continue;
        if (sizeof(STATE_T) == 4)
            copy16(&sh.share[i][threadIdx.x], share + load_offset(i), true);
        else
            copy8(&sh.share[i][threadIdx.x], share + load_offset(i));
    }
}

__device__ __forceinline__ void load_ahead(const Args& p, Shared& sh, const Work& w, int tile) {
    if (is_ours(p, w) && can_be_right(p, w) && w.base > 0) load_share(p, sh, w, tile, 0, AHEAD);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    fold_verify(const __grid_constant__ Args p) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int g = lane >> 2, t = lane & 3;
    int turn = 0;
    Work work = find_work(p, blockIdx.x);
    load_ahead(p, sh, work, blockIdx.x);
    // The state is no concern of the launch before this one; the rows are.
    if (PDL) asm volatile("griddepcontrol.wait;" ::: "memory");

#pragma unroll 1
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, turn ^= 1) {
        if (tile != blockIdx.x) work = read_work(sh.work[turn]);
        const int next = tile + gridDim.x;
        if (next < p.tiles) copy_work(p, next, sh.work[turn ^ 1]);
        const int head = tile / SLICES % VALUE_HEADS, slice = tile % SLICES;
        const int key_head = head / (VALUE_HEADS / KEY_HEADS);
        const int first = work.first, T = work.T, base = work.base, P = work.P, J = P + T;
        const long long slot = work.slot;
        bf16* out = p.out + first * p.out_stride + head * DIM + slice * BV;
        const bool serve = is_ours(p, work) && can_be_right(p, work);
        if (!serve) {
            if (T > 0 && (slot == 0 || T <= p.max_rows)) {
                // No answer is better than a wrong one that looks right.
                const u32 x = slot == 0 ? 0u : ~0u;
                for (int i = tid; i < T * (BV / 8); i += THREADS)
                    *(uint4*)(out + (i / (BV / 8)) * p.out_stride + (i % (BV / 8)) * 8) =
                        make_uint4(x, x, x, x);
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            if (next < p.tiles) load_ahead(p, sh, read_work(sh.work[turn ^ 1]), next);
            continue;
        }
        const int nb = (J + TILE - 1) / TILE, nq = (T + TILE - 1) / TILE,
                  nf = (P + TILE - 1) / TILE;
        STATE_T* state = share_of(p, work, tile);
        float4 held[AHEAD];

        // Where row j lies in a ring of `width` elements a row; J <= R, so that one step back is
        // enough.
        const int origin = (int)((u32)base % RING);
        auto place_in_ring = [&](int j, int width) {
            const int at = (origin + j) * width;
            return at < RING * width ? at : at - RING * width;
        };

        // Gates: a lane of the last warp takes rows 2 l and 2 l + 1.
        bf16 a_raw[2] = {0, 0}, b_raw[2] = {0, 0};
        RATE_T A_log = 0;
        BIAS_T dt_bias = 0;
        if (warp == WARPS - 1) {
            A_log = p.A_log[head];
            dt_bias = p.dt_bias[head];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (2 * lane + e >= J) continue;
                const int at = place_in_ring(2 * lane + e, VALUE_HEADS) + head;
                a_raw[e] = p.a_ring[slot * p.a_stride + at];
                b_raw[e] = p.b_ring[slot * p.b_stride + at];
            }
        }

        {
            const int word = tid & 63, part = word & 7;
            const int place = (word & ~7) * 2 + (part & 1) * 8 + (part >> 1) * 2;
            const bf16* k_ring = p.k_ring + slot * p.k_stride + key_head * DIM + word * 2;
            const bf16* q = p.q + first * p.q_stride + key_head * DIM + word * 2;
            const bf16* v_ring =
                p.v_ring + slot * p.v_stride + head * DIM + slice * BV + (tid % (BV / 8)) * 8;
#pragma unroll
            for (int b = 0; b < NB; ++b) {
                if (b >= nb) continue;
#pragma unroll
                for (int i = 0; i < TILE; i += THREADS / 64) {
                    const int j = b * TILE + i + (tid >> 6);
                    copy4(&sh.k[j][place], k_ring + place_in_ring(j, KEY_HEADS * DIM), j < J);
                }
                const int j = b * TILE + tid / (BV / 8);
                copy16(&sh.v[j][(tid % (BV / 8)) * 8], v_ring + place_in_ring(j, VALUE_HEADS * DIM),
                       j < J);
            }
            // A place past the last row is computed but not read.
#pragma unroll
            for (int b = 0; b < NQ; ++b) {
                if (b >= nq) continue;
#pragma unroll
                for (int i = 0; i < TILE; i += THREADS / 64) {
                    const int j = b * TILE + i + (tid >> 6);
                    copy4(&sh.q[j][place], q + j * p.q_stride, j < T);
                }
            }
        }

        if (base > 0) load_share(p, sh, work, tile, AHEAD, 16);

        if (warp == WARPS - 1) {
            // The sums are double so that their differences keep the small gates after a large one.
            const float rate = -1.4426950408889634f * expf(to_float(A_log));
            const float bias = to_float(dt_bias);
            double g2[2] = {0., 0.};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 2 * lane + e;
                const float x = to_float(a_raw[e]) + bias;
                if (j < J) g2[e] = rate * (x > 20.f ? x : log1pf(expf(x)));
                if (j < NB * TILE)
                    sh.beta[j] = j < J ? 1.f / (1.f + expf(-to_float(b_raw[e]))) : 0.f;
            }
            double total = g2[0] + g2[1];
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const double other = __shfl_up_sync(~0u, total, d);
                if (lane >= d) total += other;
            }
            if (2 * lane < NB * TILE) {
                sh.sum[2 * lane] = to_pair(total - g2[1]);
                sh.sum[2 * lane + 1] = to_pair(total);
            }
            __syncwarp();
            // What the rows need after the products: nobody else waits for it.
            const float2 folded = sh.sum[max(P - 1, 0)];
            for (int j = lane; j < nb * TILE; j += 32) {
                const float2 sum = sh.sum[j];
                sh.since[j] = power_of_two(sum.x);
                sh.kept[j] = j < P ? decay(folded, sum) : 0.f;
                if (j < nq * TILE) sh.q_since[j] = power_of_two(sh.sum[min(P + j, J - 1)].x);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (base == 0) sh.share[i][tid] = {};
            if (i < AHEAD) held[i] = to_float4(sh.share[i][tid].x);
        }
        auto share = [&](int i) {
            return i < AHEAD ? held[i < AHEAD ? i : 0] : to_float4(sh.share[i][tid].x);
        };
        __syncthreads();
        if (next < p.tiles) load_ahead(p, sh, read_work(sh.work[turn ^ 1]), next);

        const int matrix = lane >> 3, within = lane & 7;
        const int row_n = within + (matrix >> 1) * 8,
                  column_n = (matrix & 1) * 8;  // rows as they lie
        const int row_t = within + (matrix & 1) * 8, column_t = (matrix >> 1) * 8;  // transposed

        // 16x16 products of rows, one a warp: K_b K_c^T for c <= b, then Q_b K_c^T. Not unrolled:
        // every copy of this would be fetched by all warps.
        const int pairs = nb * (nb + 1) / 2;
        const int producers = EARLY > 0 ? min(pairs + nq * nb, WARPS - EARLY) : WARPS;
        auto products = [&] {
#pragma unroll 1
            for (int index = warp; index < pairs + nq * nb; index += producers) {
                const bool query = index >= pairs;
                const int b =
                    query ? (index - pairs) / nb : (index >= 1) + (index >= 3) + (index >= 6);
                const int c = query ? (index - pairs) % nb : index - b * (b + 1) / 2;
                const bf16(*rows)[ROW] = query ? &sh.q[b * TILE] : &sh.k[b * TILE];
                float x[2][2][4] = {};  // odd and even steps: two chains
                float square[2][4] = {};
#pragma unroll
                for (int half = 0; half < 8; half += 2) {
                    u32 left[2][4], right[2][4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        ldmatrix(left[i], &rows[row_n][(half + i) * 16 + column_n]);
                        ldmatrix(right[i], &sh.k[c * TILE + row_n][(half + i) * 16 + column_n]);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32 a[4] = {left[i][0], left[i][2], left[i][1], left[i][3]};
                        mma_rows(x[i & 1], a, right[i]);
                        if (query && c == 0) mma_rows(square, a, left[i]);
                    }
                }
                // Squares of the rows lie on the diagonal: two in each lane of eight.
                if (t == g >> 1) {
                    const int odd = g & 1;
                    if (!query && c == b) {
                        const float low = odd ? x[0][0][1] + x[1][0][1] : x[0][0][0] + x[1][0][0];
                        const float high = odd ? x[0][1][3] + x[1][1][3] : x[0][1][2] + x[1][1][2];
                        sh.k_norm[b * TILE + g] = rsqrtf(low + 1e-6f);
                        sh.k_norm[b * TILE + 8 + g] = rsqrtf(high + 1e-6f);
                    }
                    if (query && c == 0) {
                        const float low = odd ? square[0][1] : square[0][0];
                        const float high = odd ? square[1][3] : square[1][2];
                        sh.q_norm[b * TILE + g] = rsqrtf(low + 1e-6f) * p.scale;
                        sh.q_norm[b * TILE + 8 + g] = rsqrtf(high + 1e-6f) * p.scale;
                    }
                }
                // Row i of the block is row `last` + i of all; columns up to it are seen, of k only
                // before.
                const int last = query ? P + b * TILE : b * TILE;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int row = min(last + g + (e >> 1) * 8, J - 1);
                        const int j = c * TILE + column_of(n, e, t);
                        // Above the diagonal the weight may overflow, but is not taken.
                        const float weight = decay(sh.sum[row], sh.sum[j]);
                        const float product = x[0][n][e] + x[1][n][e];
                        x[0][n][e] = j + (query ? 0 : 1) <= row ? product * weight : 0.f;
                    }
                }
                if (query || c != b) {
                    const int at =
                        query ? NB + NB * (NB - 1) / 2 + b * NB + c : NB + b * (b - 1) / 2 + c;
                    store_tile(sh.tiles[at], lane, x[0]);
                } else {
#pragma unroll
                    for (int n = 0; n < 2; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            sh.lower[b][column_of(n, e, t) * LSTRIDE + g + (e >> 1) * 8] =
                                x[0][n][e];
                }
            }
        };

        auto solve = [&](int b) {
            // A lane solves for one column of (I + L)^-1; the other warps go on to the state. With
            // z the solution scaled by r, x_i = e_i - beta_i r_i sum_{j < i} C_ij z_j and z_i = r_i
            // x_i.
            const int column = lane & 15;
            const float* lower = sh.lower[b];
            float x[TILE];
#pragma unroll
            for (int i = 0; i < TILE; ++i) x[i] = 0.f;
#pragma unroll
            for (int j = 0; j < TILE; j += 2) {
                float l[2][TILE];
#pragma unroll
                for (int i4 = j / 4; i4 < 4; ++i4) {
                    *(float4*)&l[0][i4 * 4] = *(const float4*)&lower[j * LSTRIDE + i4 * 4];
                    *(float4*)&l[1][i4 * 4] = *(const float4*)&lower[(j + 1) * LSTRIDE + i4 * 4];
                }
                const float2 norm = *(const float2*)&sh.k_norm[b * TILE + j];
                const float2 beta = *(const float2*)&sh.beta[b * TILE + j];
                x[j] = norm.x * ((j == column ? 1.f : 0.f) - beta.x * norm.x * x[j]);
#pragma unroll
                for (int i = j + 1; i < TILE; ++i) x[i] = fmaf(l[0][i], x[j], x[i]);
                x[j + 1] = norm.y * ((j + 1 == column ? 1.f : 0.f) - beta.y * norm.y * x[j + 1]);
#pragma unroll
                for (int i = j + 2; i < TILE; ++i) x[i] = fmaf(l[1][i], x[j + 1], x[i]);
            }
            const float beta = sh.beta[b * TILE + column];
            __syncwarp();
            if (lane < TILE) {
#pragma unroll
                for (int i = 0; i < TILE; ++i) sh.lower[b][i * LSTRIDE + column] = x[i] * beta;
            }
            __syncwarp();
            float m[2][4];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    m[n][e] = lower[(g + (e >> 1) * 8) * LSTRIDE + column_of(n, e, t)];
            store_tile(sh.tiles[b], lane, m);
        };

        float x[NB][2][4] = {}, y[NQ][2][4] = {};
        auto meet_state = [&] {
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                Pieces a;
                const float4 low = share(2 * step), high = share(2 * step + 1);
                split(low.x, low.y, a.h[0], a.m[0], a.l[0]);
                split(high.x, high.y, a.h[1], a.m[1], a.l[1]);
                split(low.z, low.w, a.h[2], a.m[2], a.l[2]);
                split(high.z, high.w, a.h[3], a.m[3], a.l[3]);
                u32 right[NB + NQ][4];
#pragma unroll
                for (int b = 0; b < NB + NQ; ++b)
                    if (b < NB ? b < nb : b - NB < nq)
                        ldmatrix(right[b],
                                 b < NB ? &sh.k[b * TILE + row_n][step * 16 + column_n]
                                        : &sh.q[(b - NB) * TILE + row_n][step * 16 + column_n]);
                // Piece by piece over all blocks, so that no product waits for the one before it. A
                // state in bfloat16 is its own first piece.
#pragma unroll
                for (int piece = sizeof(STATE_T) == 2 ? 2 : 0; piece < 3; ++piece) {
#pragma unroll
                    for (int b = 0; b < NB + NQ; ++b) {
                        if (b < NB ? b >= nb : b - NB >= nq) continue;
                        mma_rows(b < NB ? x[b] : y[b - NB], a[piece], right[b]);
                    }
                }
            }
        };

        // A warp without products, the solvers among them, meets the state meanwhile. PTX lets
        // warps come to a barrier from different places.
        if (warp >= producers) {
            meet_state();
            asm volatile("bar.sync 0;" ::: "memory");
            if (warp >= WARPS - EARLY && warp - (WARPS - EARLY) < nb) solve(warp - (WARPS - EARLY));
        } else {
            products();
            asm volatile("bar.sync 0;" ::: "memory");
            if (EARLY == 0 && warp < nb) solve(warp);
            meet_state();
        }
        __syncthreads();

        // Corrections among the rows, and the outputs.
#pragma unroll
        for (int q = 0; q < NQ; ++q) scale_columns(y[q], &sh.q_since[q * TILE], t);
        Pieces past[NB];
#pragma unroll
        for (int b = 0; b < NB; ++b) {
            if (b >= nb) continue;
            scale_columns(x[b], &sh.since[b * TILE], t);
#pragma unroll
            for (int c = 0; c < b; ++c)
                multiply(x[b], past[c], sh.tiles[NB + b * (b - 1) / 2 + c], lane);
            u32 v[4];
            ldmatrix_trans(
                v, &sh.v[b * TILE + within + (matrix >> 1) * 8][warp * 16 + (matrix & 1) * 8]);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const u32 word = v[n * 2 + (e >> 1)];
                    x[b][n][e] = __uint_as_float(e & 1 ? word & 0xffff0000u : word << 16) -
                                 x[b][n][e] * sh.k_norm[b * TILE + column_of(n, e, t)];
                }
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
                if (q < nq)
                    multiply(y[q], past[b], sh.tiles[NB + NB * (NB - 1) / 2 + q * NB + b], lane);
        }
#pragma unroll
        for (int q = 0; q < NQ; ++q) scale_columns(y[q], &sh.q_norm[q * TILE], t);

        // The fold: each d_j at its weight in the new state, times the raw row.
        if (P > 0) {
            const float carried = power_of_two(sh.sum[P - 1].x);
#pragma unroll
            for (int b = 0; b < NB; ++b) {
                if (b >= nf) continue;
                scale_columns(x[b], &sh.kept[b * TILE], t);
                split_tile(x[b], past[b]);
            }
#pragma unroll
            for (int pair = 0; pair < 8; pair += 2) {
                float c[2][2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float4 low = share(2 * (pair + i)), high = share(2 * (pair + i) + 1);
                    const float old[2][4] = {{low.x, low.y, high.x, high.y},
                                             {low.z, low.w, high.z, high.w}};
#pragma unroll
                    for (int n = 0; n < 2; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) c[i][n][e] = old[n][e] * carried;
                }
#pragma unroll
                for (int b = 0; b < NB; ++b) {
                    if (b >= nf) continue;
                    u32 right[2][4];
                    ldmatrix_trans(right[0], &sh.k[b * TILE + row_t][pair * 16 + column_t]);
                    ldmatrix_trans(right[1], &sh.k[b * TILE + row_t][pair * 16 + 16 + column_t]);
#pragma unroll
                    for (int piece = 0; piece < 3; ++piece) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) mma_rows(c[i], past[b][piece], right[i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    STATE_T* to = state + (pair + i) * 16;
                    store4(to, make_float4(c[i][0][0], c[i][0][1], c[i][1][0], c[i][1][1]));
                    store4(to + 8 * DIM,
                           make_float4(c[i][0][2], c[i][0][3], c[i][1][2], c[i][1][3]));
                }
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
                    sh.v[column_of(n, e, t)][warp * 16 + g + (e >> 1) * 8] =
                        (bf16)pack(y[q][n][e], 0.f);
            __syncwarp();
            const int row = lane >> 1, column = warp * 16 + (lane & 1) * 8;
            if (q * TILE + row < T)
                *(uint4*)(out + (q * TILE + row) * p.out_stride + column) =
                    *(const uint4*)&sh.v[row][column];
        }
        __syncthreads();
    }
}
