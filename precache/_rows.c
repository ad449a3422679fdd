/* What a batch of rows costs most, compiled: copying rows, decompressing them, and undoing the
   filter of `image`. Python does the same, slower, where no C compiler was at hand.

   All functions let go of the interpreter lock, and check every offset before they read. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define AHEAD (16 * LINE)

/* ---- pieces of sources ---------------------------------------------------------------------- */

/* `lengths[i]` bytes from `starts[i]` of the source `numbers[i]`, for each i below `count`. */
typedef struct {
    Py_buffer *sources;
    Py_ssize_t source_count, count;
    Py_buffer numbers, starts, lengths;
} Pieces;

static const uint8_t *piece(const Pieces *pieces, Py_ssize_t i)
{
    const int64_t *numbers = pieces->numbers.buf, *starts = pieces->starts.buf;
    return (const uint8_t *)pieces->sources[numbers[i]].buf + starts[i];
}

static size_t piece_size(const Pieces *pieces, Py_ssize_t i)
{
    return (size_t)((const int64_t *)pieces->lengths.buf)[i];
}

static void close_pieces(Pieces *pieces)
{
    for (Py_ssize_t i = 0; i < pieces->source_count; i++)
        PyBuffer_Release(&pieces->sources[i]);
    PyMem_Free(pieces->sources);
    PyBuffer_Release(&pieces->numbers);
    PyBuffer_Release(&pieces->starts);
    PyBuffer_Release(&pieces->lengths);
}

static int pieces_lie_inside(const Pieces *pieces)
{
    const int64_t *numbers = pieces->numbers.buf, *starts = pieces->starts.buf;
    const int64_t *lengths = pieces->lengths.buf;
    for (Py_ssize_t i = 0; i < pieces->count; i++) {
        if (numbers[i] < 0 || numbers[i] >= pieces->source_count)
            return 0;
        int64_t size = pieces->sources[numbers[i]].len;
        if (starts[i] < 0 || lengths[i] < 0 || starts[i] > size || lengths[i] > size - starts[i])
            return 0;
    }
    return 1;
}

/* Takes over the three buffers of int64, and gives them back where it fails. */
static int open_pieces(Pieces *pieces, PyObject *list)
{
    Py_ssize_t count = PyList_Size(list), size = sizeof(int64_t);
    pieces->source_count = 0;
    pieces->count = pieces->numbers.len / size;
    pieces->sources = PyMem_Calloc(count ? count : 1, sizeof(Py_buffer));
    if (pieces->sources == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (; pieces->source_count < count; pieces->source_count++) {
        PyObject *item = PyList_GetItem(list, pieces->source_count);
        Py_buffer *source = &pieces->sources[pieces->source_count];
        if (item == NULL || PyObject_GetBuffer(item, source, PyBUF_SIMPLE) < 0)
            goto failed;
    }
    if (pieces->starts.len != pieces->count * size || pieces->lengths.len != pieces->count * size ||
        !pieces_lie_inside(pieces)) {
        PyErr_SetString(PyExc_ValueError, "pieces that do not lie in their sources");
        goto failed;
    }
    return 0;
failed:
    close_pieces(pieces);
    return -1;
}

/* ---- copying ------------------------------------------------------------------------------- */

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

/* Past the caches: memory that is overwritten need not be read first, and what the caches hold
   stays. Four places at a time keep more of the memory's banks busy than one does. */
static void stream(uint8_t *out, const uint8_t *in, size_t size)
{
    size_t head = -(uintptr_t)out & (LINE - 1);
    if (size < head + 4 * LINE) {
        memcpy(out, in, size);
        return;
    }
    memcpy(out, in, head);
    out += head, in += head, size -= head;
    size_t quarter = size / 4 & ~(size_t)(LINE - 1);
    for (size_t at = 0; at < quarter; at += LINE)
        for (size_t place = at; place < 4 * quarter; place += quarter)
            stream_line(out + place, in + place);
    memcpy(out + 4 * quarter, in + 4 * quarter, size - 4 * quarter);
}

static void end_streaming(void) { _mm_sfence(); }

#else

static void stream(uint8_t *out, const uint8_t *in, size_t size) { memcpy(out, in, size); }
static void end_streaming(void) {}

#endif

static void put(uint8_t *out, const uint8_t *in, size_t size, int past_caches)
{
    if (past_caches)
        stream(out, in, size);
    else
        memcpy(out, in, size);
}

PyDoc_STRVAR(gather_doc,
"gather(sources, numbers, starts, lengths, out, past_caches)\n--\n\n"
"Copy `lengths[i]` bytes from `starts[i]` of `sources[numbers[i]]`, one after another, into `out`.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Pieces pieces;
    Py_buffer out;
    int past_caches;
    if (!PyArg_ParseTuple(args, "O!y*y*y*w*p:gather", &PyList_Type, &list, &pieces.numbers,
                          &pieces.starts, &pieces.lengths, &out, &past_caches))
        return NULL;
    if (open_pieces(&pieces, list) == 0) {
        size_t left = (size_t)out.len;
        Py_ssize_t i = 0;
        for (; i < pieces.count && piece_size(&pieces, i) <= left; i++)
            left -= piece_size(&pieces, i);
        if (i < pieces.count || left != 0) {
            PyErr_SetString(PyExc_ValueError, "pieces of another size than the room for them");
        } else {
            Py_BEGIN_ALLOW_THREADS
            uint8_t *to = out.buf;
            for (i = 0; i < pieces.count; to += piece_size(&pieces, i), i++)
                put(to, piece(&pieces, i), piece_size(&pieces, i), past_caches);
            end_streaming();
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
        close_pieces(&pieces);
    }
    PyBuffer_Release(&out);
    return result;
}

/* ---- the filter of `image` ------------------------------------------------------------------ */

static void undo_row(uint8_t *row, size_t channels, size_t height, size_t width)
{
    size_t plane = height * width;
    for (size_t channel = 0; channel < channels; channel++) {
        uint8_t *lines = row + channel * plane;
        for (size_t i = width; i < plane; i++)
            lines[i] += lines[i - width];
    }
    if (channels == 3) {
        uint8_t *red = row, *green = row + plane, *blue = row + 2 * plane;
        for (size_t i = 0; i < plane; i++) {
            red[i] += green[i];
            blue[i] += green[i];
        }
    }
}

PyDoc_STRVAR(undo_image_doc,
"undo_image(rows, channels, height, width)\n--\n\n"
"Undo the filter `precache.image` of one or more (channels, height, width) rows in place.");

/* A shape of rows that an object of `size` bytes holds some of, exactly. */
typedef struct {
    Py_ssize_t channels, height, width;
} Shape;

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
    size_t channels = (size_t)shape.channels, height = (size_t)shape.height;
    size_t width = (size_t)shape.width, row = channels * height * width;
    for (size_t start = 0; start < size; start += row)
        undo_row(rows + start, channels, height, width);
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

/* Of zstd.h, all of its stable interface; from the library that numcodecs brings. */
static struct {
    void *(*create)(void);
    size_t (*release)(void *context);
    size_t (*decompress)(void *context, void *out, size_t room, const void *in, size_t size);
} zstd;

PyDoc_STRVAR(load_zstd_doc,
"load_zstd(path)\n--\n\nTake zstd from a shared library; whether `decode` can be called.");

static PyObject *load_zstd(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s:load_zstd", &path))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        Py_RETURN_FALSE;
    *(void **)&zstd.create = dlsym(library, "ZSTD_createDCtx");
    *(void **)&zstd.release = dlsym(library, "ZSTD_freeDCtx");
    *(void **)&zstd.decompress = dlsym(library, "ZSTD_decompressDCtx");
    return PyBool_FromLong(zstd.create && zstd.release && zstd.decompress);
}

/* Decompress pieces of `size` bytes each to `out`, by way of `aside` where that is not NULL; the
   number of those that came out whole before one did not. */
static Py_ssize_t decode_pieces(const Pieces *pieces, uint8_t *out, size_t size, int filtered,
                                Shape shape, uint8_t *aside, void *context)
{
    for (Py_ssize_t i = 0; i < pieces->count; i++, out += size) {
        uint8_t *to = aside ? aside : out;
        // An error is a number larger than any size.
        if (zstd.decompress(context, to, size, piece(pieces, i), piece_size(pieces, i)) != size)
            return i;
        if (filtered)
            undo_rows(to, size, shape);
        if (aside)
            stream(out, aside, size);
    }
    return pieces->count;
}

PyDoc_STRVAR(decode_doc,
"decode(sources, numbers, starts, lengths, out, filtered, channels, height, width, past_caches)\n"
"--\n\n"
"Decompress zstd frames, each the same share of `out`, and undo the filter of their rows.\n\n"
"Returns how many came out whole before one did not.");

static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Pieces pieces;
    Py_buffer out;
    Shape shape;
    int filtered, past_caches;
    if (!PyArg_ParseTuple(args, "O!y*y*y*w*pnnnp:decode", &PyList_Type, &list, &pieces.numbers,
                          &pieces.starts, &pieces.lengths, &out, &filtered, &shape.channels,
                          &shape.height, &shape.width, &past_caches))
        return NULL;
    if (open_pieces(&pieces, list) == 0) {
        Py_ssize_t size = pieces.count ? out.len / pieces.count : 0;
        void *context = zstd.create ? zstd.create() : NULL;
        uint8_t *aside = past_caches && size ? malloc((size_t)size) : NULL;
        if (size * pieces.count != out.len || (filtered && !holds_rows(shape, size))) {
            PyErr_SetString(PyExc_ValueError, "rows of another shape");
        } else if (context == NULL || (past_caches && size && aside == NULL)) {
            PyErr_NoMemory();
        } else {
            Py_ssize_t whole;
            Py_BEGIN_ALLOW_THREADS
            whole = decode_pieces(&pieces, out.buf, (size_t)size, filtered, shape, aside, context);
            end_streaming();
            Py_END_ALLOW_THREADS
            result = PyLong_FromSsize_t(whole);
        }
        free(aside);
        if (context)
            zstd.release(context);
        close_pieces(&pieces);
    }
    PyBuffer_Release(&out);
    return result;
}

/* ---- the module ----------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, gather_doc},
    {"undo_image", undo_image, METH_VARARGS, undo_image_doc},
    {"load_zstd", load_zstd, METH_VARARGS, load_zstd_doc},
    {"decode", decode, METH_VARARGS, decode_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "precache._rows", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModuleDef_Init(&module); }
