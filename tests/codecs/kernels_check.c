/* Check the compiled kernels against plain loops, without an interpreter: for processors that are
   emulated. Exits with 0 if all agree, and prints what was checked. */

#include "../../precache/codecs/_rows.c"

#include <stdio.h>

#define ROOM (1 << 18)

static uint64_t state = 88172645463325252u;

static uint8_t random_byte(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint8_t)state;
}

static void fill(uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = random_byte();
}

static void require(int holds, const char *what, size_t size, size_t shift)
{
    if (!holds) {
        printf("%s differs at size %zu, shift %zu\n", what, size, shift);
        exit(1);
    }
}

/* The CRC32C, a bit at a time. */
static uint32_t plain_crc(const uint8_t *in, size_t size)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= in[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
    }
    return ~crc;
}

static int untouched(const uint8_t *out, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        if (out[i] != 0xaa)
            return 0;
    return 1;
}

static void check_copies(const uint8_t *in, uint8_t *out, size_t size, size_t shift)
{
    for (int past_caches = 0; past_caches < 2; past_caches++) {
        memset(out, 0xaa, ROOM);
        put(out + shift, in + 1, size, past_caches);
        end_streaming();
        require(!memcmp(out + shift, in + 1, size), "copy", size, shift);
        require(untouched(out, 0, shift) && untouched(out, shift + size, ROOM), "rest", size, shift);
        if (HAS_CRC32C) {
            memset(out, 0xaa, ROOM);
            uint32_t crc = crc32c_copying(out + shift, in + 1, size, past_caches);
            end_streaming();
            require(!memcmp(out + shift, in + 1, size), "checked copy", size, shift);
            require(crc == plain_crc(in + 1, size), "checksum of a copy", size, shift);
            require(crc == crc32c_copying(NULL, in + 1, size, 0), "checksum", size, shift);
        }
    }
    if (PLACES * size + shift <= ROOM) {
        const uint8_t *rows[PLACES] = {in + 3, in, in + 7, in + 1};
        memset(out, 0xaa, ROOM);
        stream_rows(out + shift, rows, size);
        end_streaming();
        for (int row = 0; row < PLACES; row++)
            require(!memcmp(out + shift + row * size, rows[row], size), "row", size, shift);
        require(untouched(out, shift + PLACES * size, ROOM), "rest of rows", size, shift);
    }
}

static void check_filter(uint8_t *row, uint8_t *expected, Shape shape)
{
    size_t width = (size_t)shape.width, plane = (size_t)shape.height * width;
    size_t size = (size_t)shape.channels * plane;
    fill(expected, size);
    /* Do what `filter_image` does, from the last byte to the first. */
    memcpy(row, expected, size);
    if (shape.channels == 3)
        for (size_t i = 0; i < plane; i++)
            row[i] -= row[plane + i], row[2 * plane + i] -= row[plane + i];
    for (size_t channel = 0; channel < (size_t)shape.channels; channel++)
        for (size_t i = plane; i-- > width;)
            row[channel * plane + i] -= row[channel * plane + i - width];
    undo_rows(row, size, shape);
    require(!memcmp(row, expected, size), "filter", plane, width);
}

int main(void)
{
    static uint8_t in[ROOM + 64], out[ROOM];
    const size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 255, 256, 319, 320, 511, 4099, 37632, 150528};
    const size_t shifts[] = {0, 1, 16, 63};
    fill(in, sizeof in);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof shifts / sizeof *shifts; j++)
            check_copies(in, out, sizes[i], shifts[j]);
    for (Py_ssize_t channels = 1; channels <= 4; channels++)
        for (Py_ssize_t width = 1; width < 70; width += 4)
            check_filter(in, out, (Shape){channels, 5, width});
    if (HAS_CRC32C)
        require(plain_crc((const uint8_t *)"123456789", 9) == 0xe3069283, "known checksum", 9, 0);
    printf("copies, filters%s\n", HAS_CRC32C ? ", checksums" : "");
    return 0;
}
