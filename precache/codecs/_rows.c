/* The costliest work on a batch, compiled: copy rows, check them, decompress them, undo the filter
   of `image`, and resize windows of images. Python does the same, slower, where no C compiler was at hand.

   All functions release the interpreter lock, and check every offset before they read. */

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_GIL_DISABLED) /* free-threaded Pythons have no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* The instructions for CRC32C, and whether this machine has them. */
#if defined(__x86_64__) && defined(__SSE2__) && defined(__GNUC__)
#include <immintrin.h>
#define USES_AVX2 __attribute__((target("avx2")))
#if !defined(HAS_AVX2)
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#endif
#define HAS_CRC32C __builtin_cpu_supports("sse4.2")
#if defined(__clang__)
#define USES_CRC32C __attribute__((target("crc32")))
#else
#define USES_CRC32C __attribute__((target("sse4.2")))
#endif
#define CRC_OF_WORD(crc, word) ((crc) = _mm_crc32_u64(crc, word))
#define CRC_OF_BYTE(crc, byte) ((crc) = _mm_crc32_u8(crc, byte))
#elif defined(__aarch64__) && defined(__GNUC__) && (defined(__linux__) || defined(__APPLE__))
#if defined(__linux__)
#include <sys/auxv.h>
#define HAS_CRC32C ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
#else
#define HAS_CRC32C 1
#endif
#define USES_CRC32C
/* As assembly: which header and option a compiler wants for the intrinsics depends on its age. */
#define ARM_CRC(instruction, crc, operand) \
    __asm__(".arch_extension crc\n\t" instruction : "+r"(crc) : "r"(operand))
#define CRC_OF_WORD(crc, word) ARM_CRC("crc32cx %w0, %w0, %x1", crc, word)
#define CRC_OF_BYTE(crc, byte) ARM_CRC("crc32cb %w0, %w0, %w1", crc, byte)
#else
#define HAS_CRC32C 0
#define USES_CRC32C
#define CRC_OF_WORD(crc, word) ((void)(crc), (void)(word))
#define CRC_OF_BYTE(crc, byte) ((void)(crc), (void)(byte))
#endif

#define LINE 64
#define AHEAD (7 * LINE)
#define PLACES 4
#define OUTSIDE "pieces that do not lie in their sources"

/* ---- sources -------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer *views;
    Py_ssize_t count;
} Sources;

static void close_sources(Sources *sources)
{
    while (sources->count)
        PyBuffer_Release(&sources->views[--sources->count]);
    PyMem_Free(sources->views);
}

/* Open the members of a list that `numbers` names, in that order; all if it is NULL. */
static int open_sources(Sources *sources, PyObject *list, const Py_buffer *numbers)
{
    Py_ssize_t size = PyList_Size(list), wanted = size;
    if (numbers != NULL)
        wanted = numbers->len / (Py_ssize_t)sizeof(int64_t);
    sources->count = 0;
    sources->views = PyMem_Malloc((size_t)(wanted ? wanted : 1) * sizeof(Py_buffer));
    if (sources->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; sources->count < wanted; sources->count++) {
        Py_ssize_t i = sources->count;
        int64_t number = numbers ? ((const int64_t *)numbers->buf)[i] : i;
        PyObject *item = NULL;
        if (number < 0 || number >= size)
            PyErr_SetString(PyExc_ValueError, OUTSIDE);
        else
            item = PyList_GetItem(list, (Py_ssize_t)number);
        if (item == NULL || PyObject_GetBuffer(item, &sources->views[i], PyBUF_SIMPLE) < 0) {
            close_sources(sources);
            return -1;
        }
    }
    return 0;
}

/* ---- copying ------------------------------------------------------------------------------- */

static inline size_t before_line(const uint8_t *place) { return -(uintptr_t)place & (LINE - 1); }

#if defined(__SSE2__)

static inline void stream_line(uint8_t *out, const uint8_t *in)
{
    _mm_prefetch((const char *)in + AHEAD, _MM_HINT_T0);
    __m128i a = _mm_loadu_si128((const __m128i *)in);
    __m128i b = _mm_loadu_si128((const __m128i *)(in + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(in + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(in + 48));
    _mm_stream_si128((__m128i *)out, a);
    _mm_stream_si128((__m128i *)(out + 16), b);
    _mm_stream_si128((__m128i *)(out + 32), c);
    _mm_stream_si128((__m128i *)(out + 48), d);
}

/* Write past the caches: memory that is overwritten need not be read first, and the caches keep
   what they hold. Four places at a time keep more of the memory's banks busy than one does. */
static void stream_places(uint8_t *const out[PLACES], const uint8_t *const in[PLACES], size_t size)
{
    for (size_t at = 0; at < size; at += LINE)
        for (int place = 0; place < PLACES; place++)
            stream_line(out[place] + at, in[place] + at);
}

static void stream(uint8_t *out, const uint8_t *in, size_t size)
{
    size_t head = before_line(out);
    if (size < head + PLACES * LINE) {
        memcpy(out, in, size);
        return;
    }
    memcpy(out, in, head);
    out += head, in += head, size -= head;
    size_t part = size / PLACES & ~(size_t)(LINE - 1);
    uint8_t *to[PLACES];
    const uint8_t *from[PLACES];
    for (int place = 0; place < PLACES; place++)
        to[place] = out + place * part, from[place] = in + place * part;
    stream_places(to, from, part);
    memcpy(out + PLACES * part, in + PLACES * part, size - PLACES * part);
}

/* Write rows of `size` bytes one after another, past the caches. */
static void stream_rows(uint8_t *out, const uint8_t *const in[PLACES], size_t size)
{
    size_t lines = size;
    uint8_t *to[PLACES];
    const uint8_t *from[PLACES];
    for (int row = 0; row < PLACES; row++) {
        size_t head = before_line(out + row * size);
        if (size < head + PLACES * LINE) {
            for (int copied = 0; copied < PLACES; copied++)
                memcpy(out + copied * size, in[copied], size);
            return;
        }
        to[row] = out + row * size + head, from[row] = in[row] + head;
        size_t room = (size - head) & ~(size_t)(LINE - 1);
        lines = room < lines ? room : lines;
    }
    stream_places(to, from, lines);
    for (int row = 0; row < PLACES; row++) {
        size_t head = (size_t)(from[row] - in[row]), done = head + lines;
        memcpy(out + row * size, in[row], head);
        memcpy(out + row * size + done, in[row] + done, size - done);
    }
}

static void end_streaming(void) { _mm_sfence(); }

#else

/* Arm's processors detect long writes, and send them past the caches by themselves. */
static inline void stream_line(uint8_t *out, const uint8_t *in) { memcpy(out, in, LINE); }

static void stream(uint8_t *out, const uint8_t *in, size_t size) { memcpy(out, in, size); }

static void stream_rows(uint8_t *out, const uint8_t *const in[PLACES], size_t size)
{
    for (int row = 0; row < PLACES; row++)
        memcpy(out + row * size, in[row], size);
}

static void end_streaming(void) {}

#endif

static void put(uint8_t *out, const uint8_t *in, size_t size, int past_caches)
{
    if (past_caches)
        stream(out, in, size);
    else
        memcpy(out, in, size);
}

/* ---- CRC32C --------------------------------------------------------------------------------- */

#define CRC_SIZE 4

/* The CRCs of PLACES pieces of `size` bytes, which are copied unless `out` is NULL. The instruction
   takes three cycles, and another can begin in each: four places keep it busy. */
USES_CRC32C static inline void extend_places(uint64_t crcs[PLACES], const uint8_t *in, size_t size,
                                             uint8_t *out, int past_caches)
{
    for (size_t line = 0; line < size; line += LINE) {
        for (int place = 0; place < PLACES; place++) {
            size_t at = place * size + line;
            if (out && past_caches)
                stream_line(out + at, in + at);
            else if (out)
                memcpy(out + at, in + at, LINE);
        }
        for (size_t word = line; word < line + LINE; word += 8)
            for (int place = 0; place < PLACES; place++) {
                uint64_t value;
                memcpy(&value, in + place * size + word, sizeof value);
                CRC_OF_WORD(crcs[place], value);
            }
    }
}

USES_CRC32C static uint32_t extend(uint32_t crc, const uint8_t *in, size_t size)
{
    for (; size; size--)
        CRC_OF_BYTE(crc, *in++);
    return crc;
}

/* Multiply two polynomials modulo that of CRC32C; the highest bit is the constant term. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? b >> 1 ^ 0x82f63b78 : b >> 1;
    }
    return product;
}

/* The factor of a CRC for `size` bytes of zeros behind it: x to the power of 8 * size. */
static uint32_t zeros_behind(size_t size)
{
    uint32_t factor = 1u << 31, power = 1u << 23;
    for (; size; size >>= 1, power = multiply(power, power))
        if (size & 1)
            factor = multiply(factor, power);
    return factor;
}

static int by_instruction;
static uint32_t tables[8][256]; /* by how many bytes follow */

static void prepare_crc32c(void)
{
    by_instruction = HAS_CRC32C;
    for (uint32_t byte = 0; byte < 256; byte++)
        tables[0][byte] = multiply(byte, 1u << 23);
    for (int behind = 1; behind < 8; behind++)
        for (uint32_t byte = 0; byte < 256; byte++)
            tables[behind][byte] = multiply(tables[behind - 1][byte], 1u << 23);
}

/* What `extend` does, on processors without the instruction: eight bytes at a time. */
static uint32_t extend_by_tables(uint32_t crc, const uint8_t *in, size_t size)
{
    for (; size >= 8; size -= 8, in += 8) {
        uint64_t word;
        memcpy(&word, in, sizeof word);
        word ^= crc, crc = 0;
        for (int behind = 7; behind >= 0; behind--, word >>= 8)
            crc ^= tables[behind][word & 255];
    }
    for (; size; size--)
        crc = crc >> 8 ^ tables[0][(crc ^ *in++) & 255];
    return crc;
}

/* Compute the CRC32C of `in`, and copy it to `out` unless that is NULL: memory is read once. */
static uint32_t crc32c_copying(uint8_t *out, const uint8_t *in, size_t size, int past_caches)
{
    if (!by_instruction) {
        if (out)
            put(out, in, size, past_caches);
        return ~extend_by_tables(UINT32_MAX, in, size);
    }
    size_t head = before_line(out), part, rest;
    head = head < size ? head : size;
    part = (size - head) / PLACES & ~(size_t)(LINE - 1);
    rest = size - head - PLACES * part;
    uint64_t crcs[PLACES] = {extend(UINT32_MAX, in, head)};
    if (out && past_caches)
        extend_places(crcs, in + head, part, out + head, 1);
    else if (out)
        extend_places(crcs, in + head, part, out + head, 0);
    else
        extend_places(crcs, in + head, part, NULL, 0);
    uint32_t factor = zeros_behind(part), crc = (uint32_t)crcs[0];
    for (int place = 1; place < PLACES; place++)
        crc = multiply(crc, factor) ^ (uint32_t)crcs[place];
    if (out) {
        memcpy(out, in, head);
        memcpy(out + size - rest, in + size - rest, rest);
    }
    return ~extend(crc, in + size - rest, rest);
}

/* What is known of a piece: that it need not be checked, that it ends in its own checksum, or, at 0
   and above, what that is. */
#define UNCHECKED (-1)
#define OWN (-2)

static uint32_t ending(const uint8_t *end)
{
    return end[-4] | (uint32_t)end[-3] << 8 | (uint32_t)end[-2] << 16 | (uint32_t)end[-1] << 24;
}

PyDoc_STRVAR(crc32c_doc, "crc32c(data)\n--\n\nCompute the CRC32C of bytes.");

static PyObject *crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    uint32_t crc;
    if (!PyArg_ParseTuple(args, "y*:crc32c", &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c_copying(NULL, data.buf, (size_t)data.len, 0);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* ---- gathering ------------------------------------------------------------------------------ */

/* `lengths[i]` bytes from `starts[i]` of each source, followed by their CRC32C if that is checked. */
typedef struct {
    Sources sources;
    const int64_t *starts, *lengths, *checks;
} Pieces;

static int checked(const Pieces *pieces, Py_ssize_t i)
{
    return pieces->checks && pieces->checks[i] != UNCHECKED;
}

static int crc_matches(const Pieces *pieces, Py_ssize_t i, const uint8_t *end, uint32_t crc)
{
    int64_t check = pieces->checks[i];
    return crc == (check == OWN ? ending(end + CRC_SIZE) : (uint32_t)check);
}

static int pieces_lie_inside(const Pieces *pieces)
{
    for (Py_ssize_t i = 0; i < pieces->sources.count; i++) {
        int64_t size = pieces->sources.views[i].len;
        int64_t start = pieces->starts[i], length = pieces->lengths[i];
        size -= checked(pieces, i) ? CRC_SIZE : 0;
        if (start < 0 || start > size || length < 0 || length > size - start)
            return 0;
    }
    return 1;
}

static int pieces_fill(const Pieces *pieces, int64_t room)
{
    for (Py_ssize_t i = 0; i < pieces->sources.count; i++) {
        if (pieces->lengths[i] > room)
            return 0;
        room -= pieces->lengths[i];
    }
    return room == 0;
}

/* Return whether PLACES pieces from `i` on have one length and are not to be checked. */
static int alike(const Pieces *pieces, Py_ssize_t i)
{
    if (i + PLACES > pieces->sources.count)
        return 0;
    for (Py_ssize_t other = i; other < i + PLACES; other++)
        if (pieces->lengths[other] != pieces->lengths[i] || checked(pieces, other))
            return 0;
    return 1;
}

/* Copy pieces; return how many came before the first whose CRC32C does not match. */
static Py_ssize_t put_pieces(const Pieces *pieces, uint8_t *out, int past_caches)
{
    Py_ssize_t i = 0;
    while (i < pieces->sources.count) {
        size_t size = (size_t)pieces->lengths[i];
        int count = past_caches && alike(pieces, i) ? PLACES : 1;
        const uint8_t *from[PLACES];
        for (int place = 0; place < count; place++) {
            const uint8_t *source = pieces->sources.views[i + place].buf;
            from[place] = source + pieces->starts[i + place];
        }
        if (count == PLACES)
            stream_rows(out, from, size);
        else if (!checked(pieces, i))
            put(out, from[0], size, past_caches);
        else if (!crc_matches(pieces, i, from[0] + size,
                              crc32c_copying(out, from[0], size, past_caches)))
            break;
        out += count * size;
        i += count;
    }
    end_streaming();
    return i;
}

PyDoc_STRVAR(gather_doc,
"gather(sources, numbers, starts, lengths, checks, out, past_caches)\n--\n\n"
"Copy `lengths[i]` bytes from `starts[i]` of `sources[numbers[i]]`, one after another, into `out`."
"\n\nReturns the number of pieces before the first whose CRC32C is not that in `checks` (int64):\n"
"-2 stands for the one stored behind it, and at -1, or where `checks` is None, none is checked.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Pieces pieces;
    Py_buffer numbers, starts, lengths, checks, out;
    int past_caches;
    if (!PyArg_ParseTuple(args, "O!y*y*y*z*w*p:gather", &PyList_Type, &list, &numbers, &starts,
                          &lengths, &checks, &out, &past_caches))
        return NULL;
    Py_ssize_t copied;
    if (open_sources(&pieces.sources, list, &numbers) == 0) {
        pieces.starts = starts.buf, pieces.lengths = lengths.buf, pieces.checks = checks.buf;
        if (starts.len != numbers.len || lengths.len != numbers.len ||
            (checks.buf && checks.len != numbers.len) || !pieces_lie_inside(&pieces)) {
            PyErr_SetString(PyExc_ValueError, OUTSIDE);
        } else if (!pieces_fill(&pieces, out.len)) {
            PyErr_SetString(PyExc_ValueError, "pieces of another size than the room for them");
        } else {
            Py_BEGIN_ALLOW_THREADS
            copied = put_pieces(&pieces, out.buf, past_caches);
            Py_END_ALLOW_THREADS
            result = PyLong_FromSsize_t(copied);
        }
        close_sources(&pieces.sources);
    }
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    if (checks.obj)
        PyBuffer_Release(&checks);
    PyBuffer_Release(&out);
    return result;
}

/* ---- the filter of `image` ------------------------------------------------------------------ */

/* Undo the filter of a row's first lines, which are `used` bytes of each channel. Inlined, it is
   slower. */
__attribute__((noinline)) static void undo_lines(uint8_t *row, size_t channels, size_t plane,
                                                 size_t width, size_t used)
{
    for (size_t channel = 0; channel < channels; channel++) {
        uint8_t *lines = row + channel * plane;
        for (size_t i = width; i < used; i++)
            lines[i] += lines[i - width];
    }
    if (channels == 3) {
        uint8_t *red = row, *green = row + plane, *blue = row + 2 * plane;
        for (size_t i = 0; i < used; i++) {
            red[i] += green[i];
            blue[i] += green[i];
        }
    }
}

PyDoc_STRVAR(undo_image_doc,
"undo_image(rows, channels, height, width)\n--\n\n"
"Undo the filter `precache.image` of one or more (channels, height, width) rows in place.");

/* The shape of a row. */
typedef struct {
    Py_ssize_t channels, height, width;
} Shape;

/* Return whether `size` bytes are a whole number of rows. */
static int holds_rows(Shape shape, Py_ssize_t size)
{
    Py_ssize_t most = PY_SSIZE_T_MAX;
    return shape.channels > 0 && shape.height > 0 && shape.width > 0 &&
           shape.width <= most / shape.height &&
           shape.channels <= most / (shape.height * shape.width) &&
           size % (shape.channels * shape.height * shape.width) == 0;
}

static void undo_rows(uint8_t *rows, size_t size, Shape shape)
{
    size_t channels = (size_t)shape.channels, width = (size_t)shape.width;
    size_t plane = (size_t)shape.height * width;
    for (size_t start = 0; start < size; start += channels * plane)
        undo_lines(rows + start, channels, plane, width, plane);
}

static PyObject *undo_image(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer rows;
    Shape shape;
    if (!PyArg_ParseTuple(args, "w*nnn:undo_image", &rows, &shape.channels, &shape.height,
                          &shape.width))
        return NULL;
    PyObject *result = NULL;
    if (!holds_rows(shape, rows.len)) {
        PyErr_SetString(PyExc_ValueError, "rows of another shape");
    } else {
        Py_BEGIN_ALLOW_THREADS
        undo_rows(rows.buf, (size_t)rows.len, shape);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&rows);
    return result;
}

/* ---- zstd ----------------------------------------------------------------------------------- */

/* Functions of libzstd's public ABI (zstd.h). */
typedef struct {
    void *(*create)(void);
    size_t (*release)(void *context);
    size_t (*decompress)(void *context, void *out, size_t room, const void *in, size_t size);
    unsigned long long (*content_size)(const void *in, size_t size);
    size_t (*frame_size)(const void *in, size_t size);
    size_t (*set)(void *context, int parameter, int value);
} Zstd;

#define CONTENT_SIZE_UNKNOWN (0ULL - 1)
#define FORCE_IGNORE_CHECKSUM 1002

static Zstd zstd;

PyDoc_STRVAR(load_zstd_doc,
"load_zstd(path)\n--\n\nLoad libzstd, by path or by name; return whether `decode` can be called.");

static PyObject *load_zstd(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    if (!PyArg_ParseTuple(args, "O&:load_zstd", PyUnicode_FSConverter, &path))
        return NULL;
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL);
    Py_DECREF(path);
    if (library == NULL)
        Py_RETURN_FALSE;
    Zstd loaded;
    *(void **)&loaded.create = dlsym(library, "ZSTD_createDCtx");
    *(void **)&loaded.release = dlsym(library, "ZSTD_freeDCtx");
    *(void **)&loaded.decompress = dlsym(library, "ZSTD_decompressDCtx");
    *(void **)&loaded.content_size = dlsym(library, "ZSTD_getFrameContentSize");
    *(void **)&loaded.frame_size = dlsym(library, "ZSTD_findFrameCompressedSize");
    *(void **)&loaded.set = dlsym(library, "ZSTD_DCtx_setParameter");
    if (!loaded.create || !loaded.release || !loaded.decompress || !loaded.content_size ||
        !loaded.frame_size || !loaded.set)
        Py_RETURN_FALSE;
    zstd = loaded;
    Py_RETURN_TRUE;
}

typedef struct {
    void *context;
    int checking; /* content checksums are compared, as they are at first */
} Decompressor;

/* Decompress `in`, checked as `wanted`; return whether it is one frame of `room` bytes. */
static int decompress(Decompressor *with, uint8_t *out, size_t room, const Py_buffer *in,
                      int64_t wanted)
{
    size_t size = (size_t)in->len;
    int check = wanted != UNCHECKED;
    if (wanted >= 0 && (size < CRC_SIZE || ending((const uint8_t *)in->buf + size) != wanted))
        return 0;
    if (check != with->checking) {
        /* A library that is too old to skip the check goes on checking. */
        if (zstd.set(with->context, FORCE_IGNORE_CHECKSUM, !check) != 0 && check)
            return 0;
        with->checking = check;
    }
    unsigned long long content = zstd.content_size(in->buf, size);
    return (content == room || content == CONTENT_SIZE_UNKNOWN) &&
           zstd.frame_size(in->buf, size) == size &&
           zstd.decompress(with->context, out, room, in->buf, size) == room;
}

/* zstd and the filter read what they have written, which should be in a cache: rows that go past
   the caches are decoded into scratch memory first, unless they are too large for a cache. */
#if defined(__SSE2__)
#define MOST_SCRATCH (1 << 20)
#else
#define MOST_SCRATCH 0
#endif

typedef struct {
    Sources sources;
    const int64_t *checks; /* NULL: each frame is checked by its own checksum */
    const int64_t *sizes;  /* NULL: all frames are of one size */
    int filtered;
    Shape shape;
} Frames;

/* True if frames of their own sizes fill the room exactly. */
static int frames_fill(const Frames *frames, Py_ssize_t room)
{
    for (Py_ssize_t i = 0; i < frames->sources.count; i++) {
        if (frames->sizes[i] < 0 || frames->sizes[i] > room)
            return 0;
        room -= (Py_ssize_t)frames->sizes[i];
    }
    return room == 0;
}

/* Decode frames of `size` bytes each, unless they have sizes of their own, by way of `scratch`
   unless it is NULL; return how many came before the first damaged one. */
static Py_ssize_t decode_frames(const Frames *frames, uint8_t *out, size_t size, uint8_t *scratch,
                                Decompressor *with)
{
    Py_ssize_t decoded = 0;
    for (; decoded < frames->sources.count; decoded++, out += size) {
        if (frames->sizes)
            size = (size_t)frames->sizes[decoded];
        uint8_t *to = scratch ? scratch : out;
        if (!decompress(with, to, size, &frames->sources.views[decoded],
                        frames->checks ? frames->checks[decoded] : OWN))
            break;
        if (frames->filtered)
            undo_rows(to, size, frames->shape);
        if (scratch)
            stream(out, scratch, size);
    }
    end_streaming();
    return decoded;
}

PyDoc_STRVAR(decode_doc,
"decode(frames, checks, out, filtered, channels, height, width, past_caches, sizes=None)\n--\n\n"
"Decompress zstd frames, each into an equal share of `out`, and undo the filter of their rows.\n"
"With `sizes` (int64), each frame has one of its own.\n\n"
"`checks` (int64) has the last four bytes of each frame, its content checksum; at -1 that is\n"
"skipped, and at -2, or where `checks` is None, the frame's own is checked.\n"
"Returns the number of frames before the first damaged one.");

static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Frames frames;
    Py_buffer checks, out, sizes = {0};
    int past_caches;
    if (!PyArg_ParseTuple(args, "O!z*w*pnnnp|z*:decode", &PyList_Type, &list, &checks, &out,
                          &frames.filtered, &frames.shape.channels, &frames.shape.height,
                          &frames.shape.width, &past_caches, &sizes))
        return NULL;
    frames.sizes = sizes.buf;
    if (open_sources(&frames.sources, list, NULL) == 0) {
        Py_ssize_t count = frames.sources.count, size = count ? out.len / count : 0, decoded;
        Decompressor with = {zstd.create ? zstd.create() : NULL, 1};
        frames.checks = checks.buf;
        int fills = frames.sizes ? sizes.len == count * (Py_ssize_t)sizeof(int64_t) &&
                                       !frames.filtered && frames_fill(&frames, out.len)
                                 : size * count == out.len;
        if (!fills ||
            (checks.buf && checks.len != count * (Py_ssize_t)sizeof(int64_t)) ||
            (frames.filtered && !holds_rows(frames.shape, size))) {
            PyErr_SetString(PyExc_ValueError, "rows of another shape");
        } else if (with.context == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "zstd was not loaded, or has no memory");
        } else {
            int via_scratch = past_caches && !frames.sizes && size && size <= MOST_SCRATCH;
            uint8_t *scratch = via_scratch ? malloc((size_t)size) : NULL;
            Py_BEGIN_ALLOW_THREADS
            decoded = decode_frames(&frames, out.buf, (size_t)size, scratch, &with);
            Py_END_ALLOW_THREADS
            free(scratch);
            result = PyLong_FromSsize_t(decoded);
        }
        if (with.context)
            zstd.release(with.context);
        close_sources(&frames.sources);
    }
    if (checks.obj)
        PyBuffer_Release(&checks);
    if (sizes.obj)
        PyBuffer_Release(&sizes);
    PyBuffer_Release(&out);
    return result;
}

/* ---- windows -------------------------------------------------------------------------------- */

/* A window of an image of uint8, resized by an antialiased triangle filter. Between its two passes
   numbers are 8.8 fixed point; weights have 16 bits, and sum up to 65535. Products lose half of
   their last digit on average, which is added up front: with at most MOST_TAPS of them, a sum does
   not overflow. */
#define LANES 16
#define MOST_TAPS 128

/* One axis of a window: `size` pixels from `first` on. The centre of output pixel i lies at
   start + (i + 0.5) * scale among them. */
typedef struct {
    int64_t first, size;
    double start, scale;
} Axis;

/* Pixels of the window that an output pixel is made of. */
typedef struct {
    int64_t first, count;
    const uint16_t *weights;
} Taps;

static int is_window(const Axis *axis, int64_t pixels)
{
    return axis->first >= 0 && axis->size > 0 && axis->first <= pixels - axis->size &&
           axis->scale > 0 && axis->scale <= (double)axis->size + 1 &&
           axis->start >= -1 && axis->start <= (double)axis->size;
}

static double support_of(const Axis *axis) { return axis->scale > 1 ? axis->scale : 1; }

static size_t most_taps(const Axis *axis) { return 2 * (size_t)support_of(axis) + 3; }

/* The taps of `out` pixels; `weights` and `values` have room for `most_taps` of each, and of one. */
static void plan_taps(Taps *taps, uint16_t *weights, double *values, const Axis *axis,
                      int64_t out, int mirrored)
{
    double support = support_of(axis);
    for (int64_t i = 0; i < out; i++) {
        double centre = axis->start + ((double)i + 0.5) * axis->scale, total = 0;
        double from = centre - support + 0.5, to = centre + support + 0.5;
        int64_t first = from > 0 ? (int64_t)from : 0, end = (int64_t)to;
        first = first < axis->size ? first : axis->size - 1;
        end = end < axis->size ? end : axis->size;
        end = end > first ? end : first + 1;
        Taps *tap = &taps[mirrored ? out - 1 - i : i];
        *tap = (Taps){first, end - first, weights};
        for (int64_t k = 0; k < tap->count; k++) {
            double distance = ((double)(first + k) + 0.5 - centre) / support;
            double value = 1 - (distance < 0 ? -distance : distance);
            values[k] = value > 0 ? value : 0;
            total += values[k];
        }
        /* Sums are rounded, not weights: what is lost of many does not add up. */
        double sum = 0;
        uint16_t before = 0, upto = UINT16_MAX;
        for (int64_t k = 0; k < tap->count; k++, before = upto) {
            sum += values[k];
            if (total > 0)
                upto = (uint16_t)(sum * UINT16_MAX / total + 0.5);
            weights[k] = (uint16_t)(upto - before);
        }
        weights += tap->count;
    }
}

static inline uint16_t times(uint16_t value, uint16_t weight)
{
    return (uint16_t)((uint32_t)value * weight >> 16);
}

/* The sum of lines of bytes by their weights, four at a time. */
static void sum_lines(uint16_t *restrict sum, const uint8_t *window, size_t stride,
                      const Taps *taps, size_t width)
{
    uint16_t start = (uint16_t)(taps->count / 2);
    for (int64_t k = 0; k < taps->count; k += 4) {
        const uint8_t *line[4];
        uint16_t w[4];
        for (int64_t i = 0; i < 4; i++) {
            int used = k + i < taps->count;
            line[i] = window + (size_t)(taps->first + (used ? k + i : k)) * stride;
            w[i] = used ? taps->weights[k + i] : 0;
        }
        const uint8_t *a = line[0], *b = line[1], *c = line[2], *d = line[3];
        if (k + 2 >= taps->count)
            for (size_t x = 0; x < width; x++)
                sum[x] = (uint16_t)((k ? sum[x] : start) + times((uint16_t)(a[x] << 8), w[0]) +
                                    times((uint16_t)(b[x] << 8), w[1]));
        else
            for (size_t x = 0; x < width; x++)
                sum[x] = (uint16_t)((k ? sum[x] : start) + times((uint16_t)(a[x] << 8), w[0]) +
                                    times((uint16_t)(b[x] << 8), w[1]) +
                                    times((uint16_t)(c[x] << 8), w[2]) +
                                    times((uint16_t)(d[x] << 8), w[3]));
    }
}

#if defined(__SSE2__)

/* Eight lines of words, `pitch` apart -> their columns, LANES apart. */
static void turn_words(uint16_t *out, const uint16_t *in, size_t pitch)
{
    __m128i a[8], b[8];
    for (size_t i = 0; i < 8; i++)
        a[i] = _mm_load_si128((const __m128i *)(in + i * pitch));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
            b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
        }
        memcpy(a, b, sizeof a);
    }
    for (size_t i = 0; i < 8; i++)
        _mm_store_si128((__m128i *)(out + i * LANES), a[i]);
}

/* The transpose of (LANES, LANES) bytes. */
static void turn_bytes(uint8_t out[LANES][LANES], const uint8_t in[LANES][LANES])
{
    __m128i a[LANES], b[LANES];
    memcpy(a, in, sizeof a);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        memcpy(a, b, sizeof a);
    }
    memcpy(out, a, sizeof a);
}

#else

static void turn_words(uint16_t *out, const uint16_t *in, size_t pitch)
{
    for (size_t i = 0; i < 8; i++)
        for (size_t j = 0; j < 8; j++)
            out[j * LANES + i] = in[i * pitch + j];
}

static void turn_bytes(uint8_t out[LANES][LANES], const uint8_t in[LANES][LANES])
{
    for (size_t i = 0; i < LANES; i++)
        for (size_t j = 0; j < LANES; j++)
            out[j][i] = in[i][j];
}

#endif

/* The sum of columns of LANES words by their weights, as bytes. */
static inline void sum_column(uint8_t out[LANES], const uint16_t *column, size_t step,
                              const Taps *tap)
{
    uint16_t start = (uint16_t)(tap->count / 2 + 128);
#if defined(__SSE2__)
    __m128i low = _mm_set1_epi16((short)start), high = low;
    for (int64_t k = 0; k < tap->count; k++, column += step * LANES) {
        __m128i weight = _mm_set1_epi16((short)tap->weights[k]);
        const __m128i *words = (const __m128i *)column;
        low = _mm_add_epi16(low, _mm_mulhi_epu16(_mm_load_si128(words), weight));
        high = _mm_add_epi16(high, _mm_mulhi_epu16(_mm_load_si128(words + 1), weight));
    }
    low = _mm_packus_epi16(_mm_srli_epi16(low, 8), _mm_srli_epi16(high, 8));
    _mm_store_si128((__m128i *)out, low);
#elif defined(__ARM_NEON)
    uint16x8_t sums[2] = {vdupq_n_u16(start), vdupq_n_u16(start)};
    for (int64_t k = 0; k < tap->count; k++, column += step * LANES)
        for (int half = 0; half < 2; half++) {
            uint16x8_t words = vld1q_u16(column + 8 * half);
            uint16x4_t low = vshrn_n_u32(vmull_n_u16(vget_low_u16(words), tap->weights[k]), 16);
            uint16x4_t high = vshrn_n_u32(vmull_n_u16(vget_high_u16(words), tap->weights[k]), 16);
            sums[half] = vaddq_u16(sums[half], vcombine_u16(low, high));
        }
    vst1q_u8(out, vcombine_u8(vshrn_n_u16(sums[0], 8), vshrn_n_u16(sums[1], 8)));
#else
    uint16_t sum[LANES];
    for (int lane = 0; lane < LANES; lane++)
        sum[lane] = start;
    for (int64_t k = 0; k < tap->count; k++, column += step * LANES)
        for (int lane = 0; lane < LANES; lane++)
            sum[lane] = (uint16_t)(sum[lane] + times(column[lane], tap->weights[k]));
    for (int lane = 0; lane < LANES; lane++)
        out[lane] = (uint8_t)(sum[lane] >> 8);
#endif
}

/* Columns of LANES words, of which each `step`th is of this channel -> lines of bytes. */
static void sum_columns(uint8_t *out, const uint16_t *columns, size_t step, const Taps *taps,
                        size_t lines, size_t width)
{
    for (size_t x = 0; x < width; x += LANES) {
        _Alignas(16) uint8_t block[LANES][LANES], turned[LANES][LANES];
        size_t used = width - x < LANES ? width - x : LANES;
        for (size_t i = 0; i < LANES; i++) {
            const Taps *tap = &taps[x + (i < used ? i : 0)];
            sum_column(block[i], columns + (size_t)tap->first * step * LANES, step, tap);
        }
        turn_bytes(turned, block);
        for (size_t i = 0; i < lines; i++)
            memcpy(out + i * width + x, turned[i], used);
    }
}

#if defined(USES_AVX2)

/* With AVX2, lines are resized one after another, and what an output pixel is made of is shuffled
   into its place: columns need not be turned. */

#define BLOCK 64       /* bytes of a line at a time: windows have at least as many */
#define GROUP 16       /* output pixels at a time, in two halves */
#define MOST_SOURCES 4 /* vectors of 8 words that the pixels of a half begin in, at most */

/* GROUP output pixels. `first` is the lowest word that begins one of a half. `vectors` of GROUP
   words are where sums start, then the orders, of each 8 words, that bring the words that pixels
   begin with into their places, then the weights of each tap. */
typedef struct {
    int64_t first[2], taps, sources;
    __m256i *vectors;
} Group;

static size_t groups_of(size_t width) { return (width + GROUP - 1) / GROUP; }

/* Group the taps of a line; 0 if pixels next to each other begin too far from each other. */
static int group_taps(Group *group, __m256i *vectors, const Taps *across, size_t width)
{
    for (size_t x = 0; x < width; x += GROUP, group++) {
        const Taps *taps[GROUP];
        *group = (Group){{INT64_MAX, INT64_MAX}, 0, 1, vectors};
        for (size_t i = 0; i < GROUP; i++) {
            taps[i] = &across[x + i < width ? x + i : width - 1];
            int64_t *first = &group->first[i / 8];
            *first = taps[i]->first < *first ? taps[i]->first : *first;
            group->taps = taps[i]->count > group->taps ? taps[i]->count : group->taps;
        }
        for (size_t i = 0; i < GROUP; i++) {
            int64_t sources = (taps[i]->first - group->first[i / 8]) / 8 + 1;
            group->sources = sources > group->sources ? sources : group->sources;
        }
        if (group->sources > MOST_SOURCES)
            return 0;
        uint16_t *starts = (uint16_t *)vectors, *orders = starts + GROUP;
        uint16_t *weights = orders + group->sources * GROUP;
        vectors += 1 + group->sources + group->taps;
        memset(orders, 0x80, (size_t)group->sources * sizeof *vectors); /* none: 0 */
        memset(weights, 0, (size_t)group->taps * sizeof *vectors);
        for (int64_t i = 0; i < GROUP; i++) {
            int64_t place = taps[i]->first - group->first[i / 8];
            starts[i] = (uint16_t)(taps[i]->count / 2 + 128);
            orders[place / 8 * GROUP + i] = (uint16_t)(0x0100 + 0x0202 * (place % 8));
            for (int64_t k = 0; k < taps[i]->count; k++)
                weights[k * GROUP + i] = taps[i]->weights[k];
        }
    }
    return 1;
}

/* As sum_lines, of at least BLOCK bytes. */
USES_AVX2 static void sum_blocks(uint16_t *sum, const uint8_t *window, size_t stride,
                                 const Taps *taps, size_t width)
{
    const __m256i zero = _mm256_setzero_si256();
    for (size_t x = 0; x < width; x += BLOCK) {
        x = x + BLOCK < width ? x : width - BLOCK;
        const uint8_t *line = window + (size_t)taps->first * stride + x;
        __m256i sums[4];
        for (int i = 0; i < 4; i++)
            sums[i] = _mm256_set1_epi16((short)(taps->count / 2));
        for (int64_t k = 0; k < taps->count; k++, line += stride) {
            __m256i weight = _mm256_set1_epi16((short)taps->weights[k]);
            for (int i = 0; i < 4; i += 2) {
                __m256i bytes = _mm256_loadu_si256((const __m256i *)(line + 16 * i));
                __m256i low = _mm256_unpacklo_epi8(zero, bytes);
                __m256i high = _mm256_unpackhi_epi8(zero, bytes);
                sums[i] = _mm256_add_epi16(sums[i], _mm256_mulhi_epu16(low, weight));
                sums[i + 1] = _mm256_add_epi16(sums[i + 1], _mm256_mulhi_epu16(high, weight));
            }
        }
        __m256i *to = (__m256i *)(sum + x);
        for (int i = 0; i < 4; i += 2) {
            _mm256_storeu_si256(to + i, _mm256_permute2x128_si256(sums[i], sums[i + 1], 0x20));
            _mm256_storeu_si256(to + i + 1, _mm256_permute2x128_si256(sums[i], sums[i + 1], 0x31));
        }
    }
}

/* Pixels of three words beside each other -> a plane of words for each. */
USES_AVX2 static void separate_three(uint16_t *restrict red, uint16_t *restrict green,
                                     uint16_t *restrict blue, const uint16_t *restrict line,
                                     size_t width)
{
    for (size_t x = 0; x < width; x++)
        red[x] = line[3 * x], green[x] = line[3 * x + 1], blue[x] = line[3 * x + 2];
}

USES_AVX2 static inline __m256i sum_group(const uint16_t *line, const Group *group,
                                          int64_t sources)
{
    const __m256i *orders = group->vectors + 1, *weights = orders + sources;
    const uint16_t *low = line + group->first[0], *high = line + group->first[1];
    __m256i sum = group->vectors[0];
    for (int64_t k = 0; k < group->taps; k++) {
        __m256i words = _mm256_setzero_si256();
        for (int64_t source = 0; source < sources; source++) {
            __m128i a = _mm_loadu_si128((const __m128i *)(low + k + 8 * source));
            __m128i b = _mm_loadu_si128((const __m128i *)(high + k + 8 * source));
            __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
            words = _mm256_or_si256(words, _mm256_shuffle_epi8(both, orders[source]));
        }
        sum = _mm256_add_epi16(sum, _mm256_mulhi_epu16(words, weights[k]));
    }
    return sum;
}

/* A line of words -> a line of bytes. */
USES_AVX2 static void sum_groups(uint8_t *out, const uint16_t *line, const Group *group,
                                 size_t width)
{
    for (size_t x = 0; x < width; x += GROUP, group++) {
        __m256i sum;
        if (group->sources == 1) /* constants, for which loops are unrolled */
            sum = sum_group(line, group, 1);
        else if (group->sources == 2)
            sum = sum_group(line, group, 2);
        else
            sum = sum_group(line, group, group->sources);
        sum = _mm256_srli_epi16(sum, 8);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(sum),
                                         _mm256_extracti128_si256(sum, 1));
        if (width - x >= GROUP)
            _mm_storeu_si128((__m128i *)(out + x), bytes);
        else
            memcpy(out + x, &bytes, width - x);
    }
}

#endif

/* An image, planar (C, H, W) or interleaved (H, W, C), and what of it to resize. */
typedef struct {
    const uint8_t *pixels;
    Shape shape;
    int interleaved, mirrored;
    Axis down, across;
} Window;

/* Any number of taps, one output pixel after another. */
static void sum_exactly(uint8_t *out, const uint8_t *window, size_t stride, size_t step,
                        const Taps *down, const Taps *across, Shape size)
{
    for (int64_t y = 0; y < size.height; y++)
        for (int64_t x = 0; x < size.width; x++) {
            const Taps *high = &down[y], *wide = &across[x];
            uint64_t sum = (uint64_t)UINT16_MAX * UINT16_MAX / 2;
            for (int64_t i = 0; i < high->count; i++) {
                const uint8_t *line = window + (size_t)(high->first + i) * stride;
                uint64_t part = 0;
                for (int64_t k = 0; k < wide->count; k++)
                    part += (uint64_t)wide->weights[k] * line[(size_t)(wide->first + k) * step];
                sum += part * high->weights[i];
            }
            out[y * size.width + x] = (uint8_t)(sum / ((uint64_t)UINT16_MAX * UINT16_MAX));
        }
}

static size_t aligned(size_t size) { return (size + LINE - 1) & ~(size_t)(LINE - 1); }

typedef struct {
    uint8_t *memory;
    size_t size;
} Scratch;

static int make_room(Scratch *scratch, size_t size)
{
    if (size > scratch->size) {
        free(scratch->memory);
        scratch->memory = aligned_alloc(LINE, aligned(size));
        scratch->size = scratch->memory ? size : 0;
    }
    return scratch->memory != NULL;
}

/* What resizing a window takes. */
typedef struct {
    const uint8_t *window; /* its first pixel */
    size_t stride, plane, step, channels, count;
    const Taps *down, *across;
    size_t height, width;
} Plan;

/* Resize LANES lines at a time, in columns; `lines` has room for twice LANES lines of `pitch`. */
static void resize_columns(uint8_t *out, const Plan *plan, uint16_t *lines, size_t pitch)
{
    uint16_t *columns = lines + LANES * pitch;
    size_t height = plan->height, width = plan->width, step = plan->step;
    for (size_t channel = 0; channel < plan->channels; channel += step) {
        const uint8_t *window = plan->window + channel * plan->plane;
        for (size_t y = 0; y < height; y += LANES) {
            size_t used = height - y < LANES ? height - y : LANES;
            for (size_t i = 0; i < LANES; i++)
                if (i < used)
                    sum_lines(lines + i * pitch, window, plan->stride, &plan->down[y + i],
                              plan->count);
                else
                    memset(lines + i * pitch, 0, pitch * sizeof(uint16_t));
            for (size_t i = 0; i < LANES; i += 8)
                for (size_t x = 0; x < plan->count; x += 8)
                    turn_words(columns + x * LANES + i, lines + i * pitch + x, pitch);
            for (size_t c = 0; c < step; c++)
                sum_columns(out + ((channel + c) * height + y) * width, columns + c * LANES, step,
                            plan->across, used, width);
        }
    }
}

#if defined(USES_AVX2)
/* Resize line by line; words behind a line have no weight, and may be anything. */
USES_AVX2 static void resize_lines(uint8_t *out, const Plan *plan, uint16_t *line, size_t pitch,
                                   const Group *groups)
{
    size_t height = plan->height, width = plan->width, step = plan->step;
    uint16_t *planes = step > 1 ? line + plan->count : line;
    for (size_t channel = 0; channel < plan->channels; channel += step)
        for (size_t y = 0; y < height; y++) {
            sum_blocks(line, plan->window + channel * plan->plane, plan->stride, &plan->down[y],
                       plan->count);
            if (step > 1)
                separate_three(planes, planes + pitch, planes + 2 * pitch, line, plan->count / 3);
            for (size_t c = 0; c < step; c++)
                sum_groups(out + ((channel + c) * height + y) * width, planes + c * pitch, groups,
                           width);
        }
}
#endif

/* Resize a window to planar `out`, of a height and width; 0 if there is no memory. */
static int resize_window(uint8_t *out, const Window *in, Shape size, Scratch *scratch)
{
    size_t channels = (size_t)in->shape.channels, step = in->interleaved ? channels : 1;
    size_t height = (size_t)size.height, width = (size_t)size.width;
    size_t high = most_taps(&in->down), wide = most_taps(&in->across);
    size_t stride = (size_t)in->shape.width * step;
    size_t count = (size_t)in->across.size * step, pitch = (count + 31) & ~(size_t)31;
    size_t taps_size = aligned((height + width) * sizeof(Taps));
    size_t weights_size = aligned((height * high + width * wide) * sizeof(uint16_t));
    size_t values_size = aligned((high > wide ? high : wide) * sizeof(double));
    size_t lines_size = 2 * LANES * pitch * sizeof(uint16_t);
#if defined(USES_AVX2)
    size_t groups_size = aligned(groups_of(width) * sizeof(Group));
    size_t vectors_size = groups_of(width) * (1 + MOST_SOURCES + wide) * sizeof(__m256i);
    size_t reach = (size_t)in->across.size + wide + 8 * MOST_SOURCES;
    size_t line_size = aligned((count + step * reach) * sizeof(uint16_t));
    size_t grouped_size = groups_size + aligned(vectors_size) + line_size;
    lines_size = grouped_size > lines_size ? grouped_size : lines_size;
#endif
    if (!make_room(scratch, taps_size + weights_size + values_size + lines_size))
        return 0;
    uint8_t *at = scratch->memory;
    Taps *down = (Taps *)at, *across = down + height;
    uint16_t *weights = (uint16_t *)(at += taps_size);
    double *values = (double *)(at += weights_size);
    at += values_size;
    plan_taps(down, weights, values, &in->down, size.height, 0);
    plan_taps(across, weights + height * high, values, &in->across, size.width, in->mirrored);
    Plan plan = {
        .window = in->pixels + (size_t)in->down.first * stride + (size_t)in->across.first * step,
        .stride = stride, .plane = stride * (size_t)in->shape.height, .step = step,
        .channels = channels, .count = count, .down = down, .across = across,
        .height = height, .width = width,
    };
    if (high > MOST_TAPS || wide > MOST_TAPS) {
        for (size_t channel = 0; channel < channels; channel++)
            sum_exactly(out + channel * height * width,
                        plan.window + (step > 1 ? channel : channel * plan.plane), stride, step,
                        down, across, size);
        return 1;
    }
#if defined(USES_AVX2)
    Group *groups = (Group *)at;
    if (HAS_AVX2 && count >= BLOCK && (step == 1 || step == 3) &&
        group_taps(groups, (__m256i *)(at + groups_size), across, width)) {
        uint16_t *line = (uint16_t *)(at + groups_size + aligned(vectors_size));
        resize_lines(out, &plan, line, reach, groups);
        return 1;
    }
#endif
    resize_columns(out, &plan, (uint16_t *)at, pitch);
    return 1;
}

/* ---- rows of raw420 ------------------------------------------------------------------------- */

static Py_ssize_t half_of(Py_ssize_t size) { return size - size / 2; }

/* Bytes of an image as a plane of Y, and planes of Cb and Cr of half its height and width. */
static Py_ssize_t halves_size(const Shape *shape)
{
    return shape->height * shape->width + 2 * half_of(shape->height) * half_of(shape->width);
}

/* Compiled once more for AVX2, with all that it calls. */
#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif

/* A line of Cb or Cr at full width, in sixteenths less 2048, from `count` pixels of the line that
   is nearest and the one that is next; there is one more at each end, which may be the last again. */
static ALWAYS_INLINE void widen(int16_t *restrict wide, int16_t *restrict sum, const uint8_t *near,
                         const uint8_t *next, size_t count, int at_start, int at_end)
{
    for (size_t i = at_start; i < count + 2 - at_end; i++)
        sum[i] = (int16_t)(3 * near[i] + next[i]);
    if (at_start)
        sum[0] = sum[1];
    if (at_end)
        sum[count + 1] = sum[count];
    for (size_t i = 0; i < count; i++) {
        wide[2 * i] = (int16_t)(3 * sum[i + 1] + sum[i] - 2048);
        wide[2 * i + 1] = (int16_t)(3 * sum[i + 1] + sum[i + 2] - 2048);
    }
}

/* Sixteenths times a factor of 8192ths. */
static ALWAYS_INLINE int16_t scaled(int16_t value, int16_t factor)
{
    return (int16_t)((int16_t)(value * 8) * factor >> 16);
}

static ALWAYS_INLINE uint8_t level(int16_t sixteenths)
{
    int16_t value = (int16_t)(sixteenths >> 4);
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static ALWAYS_INLINE void mix(uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue,
                       const uint8_t *restrict luma, const int16_t *restrict cb,
                       const int16_t *restrict cr, size_t width)
{
    for (size_t x = 0; x < width; x++) {
        int16_t y = (int16_t)(16 * luma[x] + 8);
        red[x] = level((int16_t)(y + scaled(cr[x], 11485)));
        green[x] = level((int16_t)(y - scaled(cb[x], 2819) - scaled(cr[x], 5850)));
        blue[x] = level((int16_t)(y + scaled(cb[x], 14516)));
    }
}

/* Make the RGB of a window, at `out`, from an image as `halves_size` says: what ITU-T T.871 makes of
   Cb and Cr that are interpolated as libjpeg does, by 9/16, 3/16, 3/16 and 1/16. */
static ALWAYS_INLINE void mix_window(uint8_t *out, const Window *in,
                                                             int16_t *room)
{
    size_t height = (size_t)in->shape.height, width = (size_t)in->shape.width;
    size_t high = (size_t)half_of(in->shape.height), half = (size_t)half_of(in->shape.width);
    size_t top = (size_t)in->down.first, lines = (size_t)in->down.size;
    size_t first = (size_t)in->across.first / 2, left = 2 * first;
    size_t end = (size_t)(in->across.first + in->across.size), pitch = end - left;
    size_t count = (end + 1) / 2 - first;
    int16_t *wide[2] = {room, room + 2 * count}, *sum = room + 4 * count;
    for (size_t y = top; y < top + lines; y++, out += pitch) {
        size_t near = y / 2, next = y & 1 ? near + 1 : near - (near > 0);
        next = next < high ? next : near;
        for (size_t c = 0; c < 2; c++) {
            const uint8_t *plane = in->pixels + height * width + c * high * half + first;
            widen(wide[c], sum, plane + near * half - 1, plane + next * half - 1, count, !first,
                  first + count == half);
        }
        mix(out, out + lines * pitch, out + 2 * lines * pitch, in->pixels + y * width + left,
            wide[0], wide[1], pitch);
    }
}

#if defined(USES_AVX2)
USES_AVX2 static void mix_window_avx2(uint8_t *out, const Window *in, int16_t *room)
{
    mix_window(out, in, room);
}
#endif

/* Have a window show its pixels as RGB; 0 if there is no memory. */
static int as_rgb(Window *in, Scratch *scratch)
{
    Py_ssize_t skipped = in->across.first & 1, pitch = in->across.size + skipped;
    size_t size = aligned((size_t)(3 * in->down.size * pitch));
    if (!make_room(scratch, size + (size_t)(3 * pitch + 16) * sizeof(int16_t)))
        return 0;
    int16_t *room = (int16_t *)(scratch->memory + size);
#if defined(USES_AVX2)
    if (HAS_AVX2)
        mix_window_avx2(scratch->memory, in, room);
    else
#endif
        mix_window(scratch->memory, in, room);
    in->pixels = scratch->memory;
    in->shape = (Shape){3, in->down.size, pitch};
    in->down.first = 0, in->across.first = skipped;
    return 1;
}

/* ---- JPEG ----------------------------------------------------------------------------------- */

typedef struct {
    int left, top, width, height;
} Region;

/* Functions of libjpeg-turbo's TurboJPEG API, from its release 3 on (turbojpeg.h). */
typedef struct {
    void *(*create)(int kind);
    void (*release)(void *handle);
    int (*set)(void *handle, int parameter, int value);
    int (*get)(void *handle, int parameter);
    int (*read_head)(void *handle, const uint8_t *in, size_t size);
    int (*crop)(void *handle, Region region);
    int (*decompress)(void *handle, const uint8_t *in, size_t size, uint8_t *out, int pitch,
                      int format);
} TurboJpeg;

#define DECOMPRESSES 1
#define STOP_ON_WARNING 0
#define SUBSAMPLING 4
#define JPEG_WIDTH 5
#define JPEG_HEIGHT 6
#define AS_RGB 0
#define AS_GREY 6
/* Of one or two columns of colours, libjpeg does not interpolate. */
#define LEAST_REGION 8

/* Second bytes of markers (ITU-T T.81, table B.1). */
#define START_OF_FRAME 0xC0
#define RESTART 0xD0
#define END 0xD9
#define START_OF_SCAN 0xDA
#define RESTART_INTERVAL 0xDD

static TurboJpeg turbojpeg;

PyDoc_STRVAR(load_turbojpeg_doc,
"load_turbojpeg(path)\n--\n\nLoad TurboJPEG, by path or by name; return whether `resize` can be "
"called with `jpeg`.");

static PyObject *load_turbojpeg(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    if (!PyArg_ParseTuple(args, "O&:load_turbojpeg", PyUnicode_FSConverter, &path))
        return NULL;
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL);
    Py_DECREF(path);
    if (library == NULL)
        Py_RETURN_FALSE;
    TurboJpeg loaded;
    *(void **)&loaded.create = dlsym(library, "tj3Init");
    *(void **)&loaded.release = dlsym(library, "tj3Destroy");
    *(void **)&loaded.set = dlsym(library, "tj3Set");
    *(void **)&loaded.get = dlsym(library, "tj3Get");
    *(void **)&loaded.read_head = dlsym(library, "tj3DecompressHeader");
    *(void **)&loaded.crop = dlsym(library, "tj3SetCroppingRegion");
    *(void **)&loaded.decompress = dlsym(library, "tj3Decompress8");
    if (!loaded.create || !loaded.release || !loaded.set || !loaded.get || !loaded.read_head ||
        !loaded.crop || !loaded.decompress)
        Py_RETURN_FALSE;
    turbojpeg = loaded;
    Py_RETURN_TRUE;
}

/* Return the place behind the next marker of an entropy-coded segment; 0 if there is none. */
static size_t behind_marker(const uint8_t *file, size_t at, size_t size)
{
    while (at + 1 < size) {
        const uint8_t *place = memchr(file + at, 0xFF, size - 1 - at);
        if (place == NULL)
            return 0;
        at = (size_t)(place - file) + 2;
        if (place[1] != 0)
            return at;
    }
    return 0;
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Make a smaller JPEG, in `out`, of the restart intervals (ITU-T T.81, F.1.1.5) that hold a window
   and the pixels beside it that colours are interpolated from, and move the window there. Returns
   its size; 0 if `file` is no baseline JPEG of such intervals, -1 if there is no memory. */
static int64_t cut_jpeg(const uint8_t *file, size_t size, Window *in, Scratch *out)
{
    size_t at = 2, frame = 0, interval = 0, length;
    int marker = 0;
    for (; marker != START_OF_SCAN; at += 2 + length) {
        if (at + 4 > size || file[at] != 0xFF)
            return 0;
        marker = file[at + 1];
        length = (size_t)file[at + 2] << 8 | file[at + 3];
        if (marker < START_OF_FRAME || (marker >= RESTART && marker <= END) || marker == 0xFF ||
            length < 4 || length > size - at - 2)
            return 0;
        if (marker == START_OF_FRAME && length >= 11 &&
            length >= 8 + 3 * (size_t)file[at + 9])
            frame = at + 5;
        if (marker == RESTART_INTERVAL)
            interval = (size_t)file[at + 4] << 8 | file[at + 5];
    }
    if (frame == 0 || file[at - length + 2] != file[frame + 4])
        return 0;
    int channels = file[frame + 4], sampling = channels == 1 ? 0x11 : file[frame + 6];
    int64_t height = file[frame] << 8 | file[frame + 1];
    int64_t width = file[frame + 2] << 8 | file[frame + 3];
    int64_t tall = (sampling & 15) * 8, wide = (sampling >> 4) * 8;
    if (interval == 0 || tall == 0 || wide == 0 || height != in->shape.height ||
        width != in->shape.width || (channels != 1 && channels != 3) ||
        (channels == 3 && (file[frame + 9] != 0x11 || file[frame + 12] != 0x11)) ||
        (width + wide - 1) / wide % (int64_t)interval != 0)
        return 0;
    wide *= (int64_t)interval;
    int64_t lines = (height + tall - 1) / tall, columns = (width + wide - 1) / wide;
    int64_t top = (in->down.first - (in->down.first > 0)) / tall;
    int64_t left = (in->across.first - (in->across.first > 0)) / wide;
    int64_t bottom = lesser((in->down.first + in->down.size) / tall + 1, lines);
    int64_t right = lesser((in->across.first + in->across.size) / wide + 1, columns);
    left -= left > 0 && lesser(right * wide, width) - left * wide < LEAST_REGION;
    if (!make_room(out, size))
        return -1;
    size_t copied = at, end;
    memcpy(out->memory, file, at);
    for (int64_t number = 0, kept = 0; number < (bottom - 1) * columns + right; at = end) {
        int64_t line = number / columns, column = number % columns;
        int closing = ++number == lines * columns ? END : RESTART + (int)((number - 1) % 8);
        end = behind_marker(file, at, size);
        if (end == 0 || file[end - 1] != closing)
            return 0;
        if (line >= top && column >= left && column < right) {
            memcpy(out->memory + copied, file + at, end - at);
            copied += end - at;
            out->memory[copied - 1] = (uint8_t)(RESTART + kept++ % 8);
        }
    }
    out->memory[copied - 1] = END;
    in->shape.height = (Py_ssize_t)(lesser(bottom * tall, height) - top * tall);
    in->shape.width = (Py_ssize_t)(lesser(right * wide, width) - left * wide);
    in->down.first -= top * tall, in->across.first -= left * wide;
    out->memory[frame] = (uint8_t)(in->shape.height >> 8);
    out->memory[frame + 1] = (uint8_t)in->shape.height;
    out->memory[frame + 2] = (uint8_t)(in->shape.width >> 8);
    out->memory[frame + 3] = (uint8_t)in->shape.width;
    return (int64_t)copied;
}

PyDoc_STRVAR(part_of_jpeg_doc,
"part_of_jpeg(file, shape, box)\n--\n\n"
"Return a smaller JPEG that has a box of the pixels of a file, the shape of all its pixels, and top\n"
"and left of the box there; None if the file has no restart intervals to make it of.\n\n"
"`shape` is (channels, height, width) of the file's pixels, `box` top, left, height and width.");

static PyObject *part_of_jpeg(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer file;
    Window in = {.down = {0, 0, 0, 1}, .across = {0, 0, 0, 1}};
    long long top, left, height, width;
    if (!PyArg_ParseTuple(args, "y*(nnn)(LLLL):part_of_jpeg", &file, &in.shape.channels,
                          &in.shape.height, &in.shape.width, &top, &left, &height, &width))
        return NULL;
    in.down.first = top, in.down.size = height, in.across.first = left, in.across.size = width;
    Scratch out = {NULL, 0};
    int64_t size = 0;
    PyObject *result = NULL;
    if (is_window(&in.down, in.shape.height) && is_window(&in.across, in.shape.width)) {
        Py_BEGIN_ALLOW_THREADS
        size = cut_jpeg(file.buf, (size_t)file.len, &in, &out);
        Py_END_ALLOW_THREADS
    }
    if (size < 0)
        PyErr_NoMemory();
    else if (size == 0)
        result = Py_NewRef(Py_None);
    else
        result = Py_BuildValue("y#(nnn)nn", (const char *)out.memory, (Py_ssize_t)size,
                               in.shape.channels, in.shape.height, in.shape.width,
                               (Py_ssize_t)in.down.first, (Py_ssize_t)in.across.first);
    free(out.memory);
    PyBuffer_Release(&file);
    return result;
}

/* Decode the window of a JPEG, with as many pixels beside it as the colours are interpolated from
   and as begin in a block; 0 if it is damaged, of other sides, or cannot be decoded so, -1 if there
   is no memory. */
static int decode_window(void *handle, const uint8_t *file, size_t size, Window *in,
                         Scratch *part, Scratch *pixels)
{
    static const int block_widths[] = {8, 16, 16, 8, 8, 32, 8}; /* by subsampling */
    const Axis *across = &in->across, *down = &in->down;
    int64_t cut = cut_jpeg(file, size, in, part);
    if (cut < 0)
        return -1;
    if (cut > 0)
        file = part->memory, size = (size_t)cut;
    if (turbojpeg.read_head(handle, file, size) != 0 ||
        turbojpeg.get(handle, JPEG_WIDTH) != in->shape.width ||
        turbojpeg.get(handle, JPEG_HEIGHT) != in->shape.height ||
        (in->shape.channels != 1 && in->shape.channels != 3))
        return 0;
    int subsampling = turbojpeg.get(handle, SUBSAMPLING);
    if (subsampling < 0 || subsampling >= (int)(sizeof block_widths / sizeof *block_widths))
        return 0;
    int64_t block = block_widths[subsampling];
    int64_t left = across->first > 0 ? (across->first - 1) / block * block : 0;
    int64_t end = across->first + across->size;
    end += end < in->shape.width;
    if (end - left < LEAST_REGION)
        end = left + LEAST_REGION < in->shape.width ? left + LEAST_REGION : in->shape.width;
    if (end - left < LEAST_REGION && left > 0)
        left -= block;
    Region region = {(int)left, (int)down->first, (int)(end - left), (int)down->size};
    if (!make_room(pixels, (size_t)(in->shape.channels * (end - left) * down->size)))
        return -1;
    if (turbojpeg.crop(handle, region) != 0 ||
        turbojpeg.decompress(handle, file, size, pixels->memory, 0,
                             in->shape.channels == 1 ? AS_GREY : AS_RGB) != 0)
        return 0;
    in->pixels = pixels->memory;
    in->shape.width = (Py_ssize_t)(end - left), in->shape.height = (Py_ssize_t)down->size;
    in->across.first -= left, in->down.first = 0;
    return 1;
}

/* ---- images ------------------------------------------------------------------------------- */

/* Images that are chunks: a head and the image as a zstd frame, or a head, a JPEG and a CRC32C. */
typedef struct {
    Sources sources;
    const int64_t *checks; /* NULL: images are not compressed */
    int filtered;
    Decompressor with;
    void *jpeg; /* NULL: chunks are zstd frames */
    Scratch pixels, part;
} Packed;

#define HEAD_SIZE 8

static int unpack_jpeg(Packed *packed, Py_ssize_t i, Window *in)
{
    const uint8_t *chunk = packed->sources.views[i].buf;
    int64_t size = packed->sources.views[i].len - CRC_SIZE, check = packed->checks[i];
    if (size < HEAD_SIZE || ending(chunk + 4) != 1 || ending(chunk + 8) != size - HEAD_SIZE ||
        (check >= 0 && ending(chunk + size + CRC_SIZE) != check) ||
        (check != UNCHECKED &&
         ending(chunk + size + CRC_SIZE) != crc32c_copying(NULL, chunk, (size_t)size, 0)))
        return 0;
    return decode_window(packed->jpeg, chunk + HEAD_SIZE, (size_t)size - HEAD_SIZE, in,
                         &packed->part, &packed->pixels);
}

/* Decompress an image down to the last line of its window, or the window of a JPEG; 0 if that is
   damaged, -1 if there is no memory. Its head is the number of rows, 1, and their size, of 32 bits each. */
static int unpack(Packed *packed, Py_ssize_t i, Window *in)
{
    if (packed->jpeg)
        return unpack_jpeg(packed, i, in);
    size_t width = (size_t)in->shape.width, plane = (size_t)in->shape.height * width;
    size_t channels = (size_t)in->shape.channels, size = channels * plane;
    if (!make_room(&packed->pixels, HEAD_SIZE + size))
        return -1;
    uint8_t *head = packed->pixels.memory, *pixels = head + HEAD_SIZE;
    if (!decompress(&packed->with, head, HEAD_SIZE + size, &packed->sources.views[i],
                    packed->checks[i]) ||
        ending(head + 4) != 1 || ending(head + 8) != size)
        return 0;
    if (packed->filtered)
        undo_lines(pixels, channels, plane, width, (size_t)(in->down.first + in->down.size) * width);
    in->pixels = pixels;
    return 1;
}

PyDoc_STRVAR(resize_doc,
"resize(sources, numbers, starts, shapes, boxes, places, mirrored, interleaved, out, height,\n"
"       width, checks=None, filtered=False, halves=False, jpeg=False)\n--\n\n"
"Resize a window of each image by an antialiased triangle filter, and mirror some.\n\n"
"With `checks`, as of `decode`, each source is a zstd frame of an image behind a head: its number,\n"
"1, and its size; or with `jpeg` and `interleaved`, a head, a JPEG file and a CRC32C. With `halves`, images are planes of Y, Cb and Cr, of which the last two have half\n"
"the height and width. Returns the number of images before the first damaged one.\n\n"
"Image i begins at `starts[i]` of `sources[numbers[i]]` (int64, n of each). `shapes` (n, 3) int64 are channels, height and width of uint8 images, planar or `interleaved`;\n"
"`boxes` (n, 4) int64 top, left, height and width of the pixels that are used; `places` (n, 4)\n"
"float64 start down and across, and pixels for each of the result down and across; `mirrored` (n,)\n"
"bool. `out` takes (n, channels, height, width).");

static PyObject *resize(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Py_buffer numbers, starts, shapes, boxes, places, mirrored, out, checks = {0};
    Packed packed = {.filtered = 0};
    Shape size = {0, 0, 0};
    int interleaved, halves = 0, jpeg = 0;
    if (!PyArg_ParseTuple(args, "O!y*y*y*y*y*y*pw*nn|z*ppp:resize", &PyList_Type, &list, &numbers,
                          &starts, &shapes, &boxes, &places, &mirrored, &interleaved, &out,
                          &size.height, &size.width, &checks, &packed.filtered, &halves, &jpeg))
        return NULL;
    if (open_sources(&packed.sources, list, &numbers) == 0) {
        Py_ssize_t count = packed.sources.count;
        const Py_buffer *images = packed.sources.views;
        const int64_t *start = starts.buf, *shape = shapes.buf, *box = boxes.buf;
        const double *place = places.buf;
        size.channels = count ? (Py_ssize_t)shape[0] : 1;
        int fits = starts.len == numbers.len && shapes.len == count * 24 && boxes.len == count * 32 &&
                   places.len == count * 32 && mirrored.len == count &&
                   (checks.obj == NULL || checks.len == numbers.len) && holds_rows(size, out.len) &&
                   (!jpeg || (checks.obj && interleaved && turbojpeg.create)) && (!halves || (size.channels == 3 && !interleaved && checks.obj == NULL)) &&
                   out.len == count * size.channels * size.height * size.width;
        Window *windows = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(Window));
        for (Py_ssize_t i = 0; windows && fits && i < count; i++) {
            Window *in = &windows[i];
            *in = (Window){
                .pixels = (const uint8_t *)images[i].buf + start[i],
                .shape = {(Py_ssize_t)shape[3 * i], (Py_ssize_t)shape[3 * i + 1],
                          (Py_ssize_t)shape[3 * i + 2]},
                .interleaved = interleaved,
                .mirrored = ((const uint8_t *)mirrored.buf)[i],
                .down = {box[4 * i], box[4 * i + 2], place[4 * i], place[4 * i + 2]},
                .across = {box[4 * i + 1], box[4 * i + 3], place[4 * i + 1], place[4 * i + 3]},
            };
            fits = in->shape.channels == size.channels && holds_rows(in->shape, 0) &&
                   start[i] >= 0 && start[i] <= images[i].len &&
                   (checks.obj || (halves ? halves_size(&in->shape) :
                                   in->shape.channels * in->shape.height * in->shape.width) <=
                                      images[i].len - start[i]) &&
                   is_window(&in->down, in->shape.height) &&
                   is_window(&in->across, in->shape.width);
        }
        if (windows == NULL) {
            PyErr_NoMemory();
        } else if (!fits) {
            PyErr_SetString(PyExc_ValueError, "windows that do not lie in their images");
        } else {
            Scratch scratch = {NULL, 0};
            Py_ssize_t done = 0, row = size.channels * size.height * size.width;
            int state = 1;
            packed.checks = checks.buf;
            if (jpeg)
                packed.jpeg = turbojpeg.create(DECOMPRESSES);
            else if (checks.obj)
                packed.with = (Decompressor){zstd.create ? zstd.create() : NULL, 1};
            if (checks.obj && packed.with.context == NULL && packed.jpeg == NULL)
                state = -1;
            if (packed.jpeg)
                turbojpeg.set(packed.jpeg, STOP_ON_WARNING, 1);
            Py_BEGIN_ALLOW_THREADS
            while (state == 1 && done < count) {
                Window *in = &windows[done];
                state = checks.obj ? unpack(&packed, done, in) : 1;
                if (halves && !as_rgb(in, &packed.pixels))
                    state = -1;
                if (state == 1 && !resize_window((uint8_t *)out.buf + done * row, in, size, &scratch))
                    state = -1;
                done += state == 1;
            }
            free(scratch.memory);
            free(packed.pixels.memory);
            free(packed.part.memory);
            Py_END_ALLOW_THREADS
            if (packed.with.context)
                zstd.release(packed.with.context);
            if (packed.jpeg)
                turbojpeg.release(packed.jpeg);
            result = state < 0 ? PyErr_NoMemory() : PyLong_FromSsize_t(done);
        }
        PyMem_Free(windows);
        close_sources(&packed.sources);
    }
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&shapes);
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&places);
    PyBuffer_Release(&mirrored);
    PyBuffer_Release(&out);
    if (checks.obj)
        PyBuffer_Release(&checks);
    return result;
}

/* ---- the module ----------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"crc32c", crc32c, METH_VARARGS, crc32c_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"undo_image", undo_image, METH_VARARGS, undo_image_doc},
    {"load_zstd", load_zstd, METH_VARARGS, load_zstd_doc},
    {"load_turbojpeg", load_turbojpeg, METH_VARARGS, load_turbojpeg_doc},
    {"part_of_jpeg", part_of_jpeg, METH_VARARGS, part_of_jpeg_doc},
    {"decode", decode, METH_VARARGS, decode_doc},
    {"resize", resize, METH_VARARGS, resize_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if defined(Py_mod_gil)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "precache.codecs._rows",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    prepare_crc32c();
    return PyModuleDef_Init(&module);
}
