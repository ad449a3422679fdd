/* Check the compiled kernels against plain loops, without an interpreter: for processors that are
   emulated. Exits with 0 if all agree, and prints what was checked. */

#if defined(__x86_64__)
static int with_avx2;
#define HAS_AVX2 with_avx2
#endif

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
        memset(out, 0xaa, ROOM);
        uint32_t crc = crc32c_copying(out + shift, in + 1, size, past_caches);
        end_streaming();
        require(!memcmp(out + shift, in + 1, size), "checked copy", size, shift);
        require(crc == plain_crc(in + 1, size), "checksum of a copy", size, shift);
        require(crc == crc32c_copying(NULL, in + 1, size, 0), "checksum", size, shift);
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

/* A pixel of a window, added up one product after another. */
static uint8_t plain_pixel(const uint8_t *window, size_t stride, size_t step, const Taps *high,
                           const Taps *wide)
{
    uint16_t sum = (uint16_t)(wide->count / 2 + 128);
    for (int64_t k = 0; k < wide->count; k++) {
        const uint8_t *column = window + (size_t)(wide->first + k) * step;
        uint16_t part = (uint16_t)(high->count / 2);
        for (int64_t i = 0; i < high->count; i++)
            part += times((uint16_t)(column[(size_t)(high->first + i) * stride] << 8),
                          high->weights[i]);
        sum += times(part, wide->weights[k]);
    }
    return (uint8_t)(sum >> 8);
}

static void check_window(const uint8_t *pixels, uint8_t *out, Shape shape, Shape size,
                         int interleaved, int mirrored)
{
    static Taps taps[2][64];
    static uint16_t weights[2][1 << 14];
    static double values[1 << 10];
    size_t step = interleaved ? (size_t)shape.channels : 1, stride = (size_t)shape.width * step;
    size_t plane = interleaved ? 1 : (size_t)(shape.height * shape.width);
    Window in = {pixels, shape, interleaved, mirrored,
                 {1, shape.height - 1, 0.25, (double)(shape.height - 2) / (double)size.height},
                 {0, shape.width, 0, (double)shape.width / (double)size.width}};
    int exact = most_taps(&in.down) > MOST_TAPS || most_taps(&in.across) > MOST_TAPS;
    Scratch scratch = {NULL, 0};
    require(is_window(&in.down, shape.height) && is_window(&in.across, shape.width), "place", 0, 0);
    require(resize_window(out, &in, size, &scratch), "memory", 0, 0);
    free(scratch.memory);
    plan_taps(taps[0], weights[0], values, &in.down, size.height, 0);
    plan_taps(taps[1], weights[1], values, &in.across, size.width, mirrored);
    for (Py_ssize_t channel = 0; channel < shape.channels; channel++)
        for (Py_ssize_t y = 0; y < size.height; y++)
            for (Py_ssize_t x = 0; x < size.width; x++) {
                const uint8_t *window = pixels + (size_t)channel * plane + stride;
                uint8_t wanted = plain_pixel(window, stride, step, &taps[0][y], &taps[1][x]);
                int difference = out[(channel * size.height + y) * size.width + x] - wanted;
                require(exact ? -1 <= difference && difference <= 1 : !difference, "window",
                        (size_t)shape.width, (size_t)size.width);
            }
}

static void check_windows(const uint8_t *in, uint8_t *out)
{
    for (Py_ssize_t channels = 1; channels <= 4; channels++)
        for (Py_ssize_t width = 3; width < 190; width += 23)
            for (Py_ssize_t side = 1; side < 60; side += 7)
                for (int way = 0; way < 4; way++)
                    check_window(in, out, (Shape){channels, width + 5, width},
                                 (Shape){channels, side, 60 - side}, way & 1, way >> 1);
}

/* A pixel of Cb or Cr at full size, in sixteenths less 2048. */
static int plain_colour(const uint8_t *plane, int64_t y, int64_t x, int64_t height, int64_t width)
{
    int64_t next_y = y & 1 ? y / 2 + 1 : y / 2 - 1, next_x = x & 1 ? x / 2 + 1 : x / 2 - 1;
    next_y = next_y < 0 || next_y == height ? y / 2 : next_y;
    next_x = next_x < 0 || next_x == width ? x / 2 : next_x;
    const uint8_t *near = plane + y / 2 * width, *next = plane + next_y * width;
    return 3 * (3 * near[x / 2] + next[x / 2]) + 3 * near[next_x] + next[next_x] - 2048;
}

static int plain_level(int sixteenths)
{
    int value = sixteenths >> 4;
    return value < 0 ? 0 : value > 255 ? 255 : value;
}

static void check_halves(const uint8_t *in, Shape shape)
{
    Window window = {in, shape, 0, 0, {1, shape.height - 2, 0, 1}, {0, 0, 0, 1}};
    Py_ssize_t high = half_of(shape.height), wide = half_of(shape.width);
    const uint8_t *blue = in + shape.height * shape.width, *red = blue + high * wide;
    for (window.across.first = 0; window.across.first < 4; window.across.first++) {
        Window rgb = window;
        Scratch scratch = {NULL, 0};
        rgb.across.size = shape.width - window.across.first - shape.width % 3;
        require(as_rgb(&rgb, &scratch), "memory", 0, 0);
        for (int64_t y = 0; y < rgb.down.size; y++)
            for (int64_t x = 0; x < rgb.across.size; x++) {
                int64_t from = window.across.first + x;
                int luma = 16 * in[(y + 1) * shape.width + from] + 8;
                int cb = plain_colour(blue, y + 1, from, high, wide) * 8;
                int cr = plain_colour(red, y + 1, from, high, wide) * 8;
                const uint8_t *out = rgb.pixels + y * rgb.shape.width + rgb.across.first + x;
                size_t plane = (size_t)(rgb.shape.height * rgb.shape.width);
                require(out[0] == plain_level(luma + (cr * 11485 >> 16)) &&
                            out[plane] == plain_level(luma - (cb * 2819 >> 16) - (cr * 5850 >> 16)) &&
                            out[2 * plane] == plain_level(luma + (cb * 14516 >> 16)),
                        "colour", (size_t)shape.width, (size_t)from);
            }
        free(scratch.memory);
    }
}

static void check_images(const uint8_t *in, uint8_t *out)
{
    check_windows(in, out);
    for (Py_ssize_t width = 7; width < 120; width++)
        check_halves(in, (Shape){3, 5 + width % 4, width});
}

int main(void)
{
    static uint8_t in[ROOM + 64], out[ROOM];
    const size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 255, 256, 319, 320, 511, 4099, 37632, 150528};
    const size_t shifts[] = {0, 1, 16, 63};
    fill(in, sizeof in);
    prepare_crc32c();
    const int has_instruction = by_instruction;
    for (by_instruction = 0; by_instruction <= has_instruction; by_instruction++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (size_t j = 0; j < sizeof shifts / sizeof *shifts; j++)
                check_copies(in, out, sizes[i], shifts[j]);
    for (Py_ssize_t channels = 1; channels <= 4; channels++)
        for (Py_ssize_t width = 1; width < 70; width += 4)
            check_filter(in, out, (Shape){channels, 5, width});
    require(plain_crc((const uint8_t *)"123456789", 9) == 0xe3069283, "known checksum", 9, 0);
    check_images(in, out);
#if defined(USES_AVX2)
    with_avx2 = __builtin_cpu_supports("avx2") != 0;
    check_images(in, out);
#endif
    printf("copies, filters, windows, colours, checksums\n");
    return 0;
}
