/* The functions of the worker protocol that every language must agree on, written from docs/protocol.md alone.
 *
 * Prints the vectors of vectors.json:  cc -O1 -o reference reference.c -lm && ./reference > vectors.json
 */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* splitmix64, the finaliser with its increment */
static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t row_factor(uint64_t row_key) { return mix(row_key) | 1; }

static uint64_t block_term(uint64_t row_key, uint64_t kv_group, uint64_t index, uint64_t block) {
    return mix(row_factor(row_key) ^ mix(kv_group << 58 | index << 32 | block));
}

static uint64_t token_term(uint64_t row_key, uint64_t position, uint64_t id) {
    return mix(row_factor(row_key) ^ mix(position << 32 | id));
}

/* BLAKE2b (RFC 7693) without a key, for inputs of at most a few blocks */
static const uint64_t IV[8] = {0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                               0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

static uint64_t rotate_right(uint64_t x, int n) { return x >> n | x << (64 - n); }

static void quarter(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotate_right(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate_right(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 63);
}

static void blake2b_128(uint8_t out[16], const uint8_t *in, size_t length) {
    uint64_t h[8], m[16], v[16];
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000u ^ 16u; /* one leaf, no key, 16 bytes of output */
    size_t done = 0;
    do {
        size_t take = length - done > 128 ? 128 : length - done;
        uint8_t block[128] = {0};
        memcpy(block, in + done, take);
        done += take;
        for (int i = 0; i < 16; i++) {
            m[i] = 0;
            for (int j = 7; j >= 0; j--) m[i] = m[i] << 8 | block[8 * i + j];
        }
        memcpy(v, h, sizeof h);
        memcpy(v + 8, IV, sizeof IV);
        v[12] ^= done;
        if (done == length) v[14] = ~v[14];
        for (int r = 0; r < 12; r++) {
            const uint8_t *s = SIGMA[r % 10];
            for (int i = 0; i < 4; i++) quarter(v, i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
            for (int i = 0; i < 4; i++)
                quarter(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
        }
        for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
    } while (done < length);
    for (int i = 0; i < 16; i++) out[i] = h[i / 8] >> 8 * (i % 8);
}

static size_t put_u32(uint8_t *at, uint32_t x) {
    for (int i = 0; i < 4; i++) at[i] = x >> 8 * i;
    return 4;
}

static size_t put_text(uint8_t *at, const char *text) {
    memcpy(at, text, strlen(text));
    return strlen(text);
}

/* noise */
static uint32_t fmix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

static uint32_t noise_bits(uint64_t seed, uint64_t sample_index, uint64_t position, uint32_t id) {
    uint64_t key = mix(mix(mix(seed) ^ sample_index) ^ position);
    return fmix(fmix(id * 0x9E3779B1u + (uint32_t)key) ^ (uint32_t)(key >> 32));
}

static double gumbel(uint32_t bits) {
    double v = (bits + 0.5) / 4294967296.0, most = 1.0 - 1.0 / 16777216.0;
    return -log(-log1p(-(v < most ? v : most)));
}

static const char *comma(int i) { return i ? ",\n    " : "\n    "; }

static void print_hex(const char *name, const uint8_t *bytes, int length, const char *after) {
    printf("\"%s\": \"", name);
    for (int i = 0; i < length; i++) printf("%02x", bytes[i]);
    printf("\"%s", after);
}

int main(void) {
    static const uint64_t inputs[] = {0, 1, 1234567, 0x9E3779B97F4A7C15u, 0xFFFFFFFFFFFFFFFFu, 0x6D616E69u};
    printf("{\n  \"mix\": [");
    for (int i = 0; i < 6; i++) printf("%s{\"x\": \"%016" PRIx64 "\", \"mix\": \"%016" PRIx64 "\"}", comma(i), inputs[i], mix(inputs[i]));

    /* rows of a batch: key, computed tokens, kv_group, blocks of that group in table order */
    static const struct { uint64_t key, n; uint32_t group, blocks[4]; int num_blocks; } rows[] = {
        {5, 33, 0, {7, 9, 2}, 3}, {0x8000000000000001u, 1, 0, {4294967295u}, 1}, {77, 0, 0, {0}, 0}, {6, 70000, 3, {1, 2, 3, 1}, 4}};
    uint64_t digest = 0;
    printf("\n  ],\n  \"state_digest\": [");
    for (int i = 0; i < 4; i++) {
        digest += row_factor(rows[i].key) * rows[i].n;
        printf("%s{\"row_key\": \"%016" PRIx64 "\", \"num_computed_tokens\": %" PRIu64 ", \"kv_group\": %u, \"blocks\": [", comma(i), rows[i].key, rows[i].n, rows[i].group);
        for (int j = 0; j < rows[i].num_blocks; j++) {
            digest += block_term(rows[i].key, rows[i].group, j, rows[i].blocks[j]);
            printf("%s%u", j ? ", " : "", rows[i].blocks[j]);
        }
        printf("], \"digest_so_far\": \"%016" PRIx64 "\"}", digest);
    }

    static const uint32_t tokens[] = {0, 1, 49151, 4294967295u, 17};
    digest = 0;
    printf("\n  ],\n  \"token_digest\": [");
    for (int i = 0; i < 5; i++) {
        uint64_t key = i < 3 ? 5 : 0x8000000000000001u, position = i < 3 ? i : 1048575 + i;
        digest += token_term(key, position, tokens[i]);
        printf("%s{\"row_key\": \"%016" PRIx64 "\", \"position\": %" PRIu64 ", \"token_id\": %u, \"digest_so_far\": \"%016" PRIx64 "\"}", comma(i), key, position, tokens[i], digest);
    }

    static const char *loras[] = {"", "", "sql", "sq"}, *salts[] = {"", "tenant-1", "", "l"};
    static const uint32_t ids[2][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {4294967295u, 49151, 256}};
    static const int lengths[2] = {16, 3};
    printf("\n  ],\n  \"block_hash\": [");
    for (int i = 0; i < 4; i++) {
        uint8_t buffer[128], name_space[16], parent[16];
        size_t end, space = 0;
        if (loras[i][0] || salts[i][0]) {
            end = put_u32(buffer, strlen(loras[i]));
            end += put_text(buffer + end, loras[i]);
            end += put_text(buffer + end, salts[i]);
            blake2b_128(name_space, buffer, end);
            space = 16;
        }
        printf("%s{\"lora\": \"%s\", \"cache_salt\": \"%s\", ", comma(i), loras[i], salts[i]);
        print_hex("namespace", name_space, space, ", ");
        end = put_text(buffer, "maniple-kv-1");
        memcpy(buffer + end, name_space, space);
        blake2b_128(parent, buffer, end + space);
        print_hex("root", parent, 16, ", \"blocks\": [");
        for (int b = 0; b < 2; b++) {
            printf("%s{\"token_ids\": [", b ? ", " : "");
            memcpy(buffer, parent, 16);
            end = 16;
            for (int j = 0; j < lengths[b]; j++) {
                end += put_u32(buffer + end, ids[b][j]);
                printf("%s%u", j ? ", " : "", ids[b][j]);
            }
            blake2b_128(parent, buffer, end);
            printf("], ");
            print_hex("hash", parent, 16, "}");
        }
        printf("]}");
    }

    static const uint64_t seeds[] = {0, 1, 1, 1, 0xFFFFFFFFFFFFFFFFu, 42}, samples[] = {0, 0, 1, 0, 63, 2}, positions[] = {0, 0, 0, 5, 4095, 131071};
    static const uint32_t drawn[] = {0, 3, 3, 3, 49151, 151935};
    printf("\n  ],\n  \"noise\": [");
    for (int i = 0; i < 6; i++) {
        uint32_t bits = noise_bits(seeds[i], samples[i], positions[i], drawn[i]);
        printf("%s{\"seed\": \"%016" PRIx64 "\", \"sample_index\": %" PRIu64 ", \"position\": %" PRIu64 ", \"token_id\": %u, \"bits\": \"%08x\", \"gumbel\": %.6f}", comma(i), seeds[i], samples[i], positions[i], drawn[i], bits, gumbel(bits));
    }
    printf("\n  ]\n}\n");
    return 0;
}
