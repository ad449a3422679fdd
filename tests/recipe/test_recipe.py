"""Recipes: one meaning, one fingerprint; wrong ones refused with the place and the choices."""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import precache
from precache.cli.main import main
from precache.errors import PrecacheError, RecipeError
from precache.recipe.base import canonical_json
from precache.recipe.ops import (
    DTYPES,
    OPS,
    CenterCrop,
    Decode,
    Function,
    HorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDType,
)
from precache.recipe.recipe import Field, ImageCodec, Recipe, ZstdCodec
from tests.support.building import write

VERSIONS = {"pillow": "12.0", "torch": "2.9"}


# --- one meaning, one fingerprint ---------------------------------------------------------------


class _Stop(PrecacheError):
    """Ends a command once it has made its recipe."""


def _from_flags(flags: str, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    seen: list[Recipe] = []

    @wraps(precache.build)  # of which the command makes its flags, once for a process
    def build(source: str, store: str, recipe: Recipe, **_: Any) -> None:
        seen.append(recipe)
        raise _Stop("enough")

    monkeypatch.setattr(precache, "build", build)
    assert main(["build", "in", "out", *flags.split()]) == 1
    return seen[0]


SAME = {
    "plain": ("", "[fields.image]\nops = [{op = 'decode'}]\n", Recipe.image()),
    "resize and crop": (
        "--resize 256 --crop 224 --codec image",
        """
        [[fields.image.ops]]
        op = "decode"
        [[fields.image.ops]]
        op = "resize"
        size = 256
        [[fields.image.ops]]
        op = "center_crop"
        size = [224, 224]
        """,
        Recipe(fields={"image": Field(ops=(Decode(), Resize(size=256), CenterCrop(size=224)))}),
    ),
    "exact size": (
        "--resize 64x96 --interpolation bicubic --mode L --codec zstd --seed 7",
        """
        seed = 7
        [fields.image]
        codec = { name = "zstd", level = 1 }
        ops = [
            { op = "decode", mode = "L" },
            { op = "resize", size = [64, 96], interpolation = "bicubic" },
        ]
        """,
        Recipe(
            fields={
                "image": Field(
                    ops=(Decode(mode="L"), Resize(size=(64, 96), interpolation="bicubic")),
                    codec="zstd",
                )
            },
            seed=7,
        ),
    ),
    "longer side": (
        "--max-size 500 --interpolation nearest --mode P",
        """
        [fields.image]
        ops = [
            { op = "decode", mode = "P" },
            { op = "resize", max_size = 500, interpolation = "nearest" },
        ]
        """,
        Recipe.image(max_size=500, interpolation="nearest", mode="P"),
    ),
    "variants": (
        "--random-resized-crop 24 --flip --variants 2",
        """
        [fields.image]
        variants = 2
        ops = [
            { op = "decode" },
            { op = "random_resized_crop", size = 24 },
            { op = "horizontal_flip" },
        ]
        """,
        Recipe.image(random_resized_crop=24, flip=True, variants=2),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_flags_toml_and_python_give_the_same_fingerprint(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, toml, python = SAME[case]
    file = tmp_path / "recipe.toml"
    file.write_text(toml)
    recipes = [
        _from_flags(flags, monkeypatch),
        _from_flags(f"--recipe {file}", monkeypatch),
        _from_flags(f"--recipe {canonical_json(python.to_dict()).decode()}", monkeypatch),
        Recipe.from_toml(file),
        python,
    ]
    assert len({p.fingerprint(VERSIONS) for p in recipes}) == 1
    assert all(p == python for p in recipes)


def test_the_fingerprint_is_the_sha256_of_the_canonical_json() -> None:
    recipe = Recipe.image(resize=256, crop=224)
    document = {"recipe": recipe.to_dict(), "ops": 1, "versions": VERSIONS}
    expected = hashlib.sha256(canonical_json(document)).hexdigest()
    assert recipe.fingerprint(VERSIONS) == expected
    assert recipe.fingerprint(dict(reversed(VERSIONS.items()))) == expected
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()


# --- round trips --------------------------------------------------------------------------------

SIZES = st.integers(1, 512)
PAIRS = st.tuples(SIZES, SIZES)
BOUNDS = st.tuples(st.floats(0.01, 1), st.floats(1, 4))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
INTERPOLATIONS = st.sampled_from(["bilinear", "bicubic", "nearest"])
LATER_OPS = st.one_of(
    st.builds(Resize, size=SIZES | PAIRS, interpolation=INTERPOLATIONS),
    st.builds(CenterCrop, size=SIZES | PAIRS),
    st.builds(RandomResizedCrop, size=PAIRS, scale=BOUNDS, ratio=BOUNDS),
    st.builds(HorizontalFlip, p=st.floats(0, 1)),
    st.builds(ToDType, dtype=st.sampled_from(DTYPES)),
    st.builds(
        Function,
        function=st.just("package.module:function"),
        version=st.none() | st.text(max_size=4),
        params=st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=2),
        dtype=st.none() | st.sampled_from(DTYPES),
        shape=st.none() | st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    ),
)
DECODES = st.builds(Decode, mode=st.sampled_from(["RGB", "L", "RGBA"]), scaled=st.booleans())
CODEC_CHOICES = st.none() | st.sampled_from(["raw", "zstd", {"name": "zstd", "level": -3}])


@st.composite
def fields(draw: st.DrawFn) -> Field:
    first = draw(st.lists(DECODES, max_size=1))
    try:
        return Field(
            ops=(*first, *draw(st.lists(LATER_OPS, max_size=3))),
            codec=draw(CODEC_CHOICES),
            input=draw(st.none() | st.text(max_size=3) | st.integers(0, 3)),
        )
    except RecipeError:
        assume(False)
        raise


RECIPES = st.builds(
    Recipe,
    fields=st.dictionaries(st.sampled_from(["image", "mask", "depth"]), fields(), min_size=1),
    seed=st.integers(-(2**40), 2**40),
)


@given(RECIPES)
def test_plain_data_round_trips_and_keeps_the_fingerprint(recipe: Recipe) -> None:
    data = json.loads(canonical_json(recipe.to_dict()))
    again = Recipe.from_dict(data)
    assert again == recipe
    assert again.to_dict() == recipe.to_dict()
    assert again.fingerprint(VERSIONS) == recipe.fingerprint(VERSIONS)


@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3) | JSON_VALUES)
def test_any_other_data_is_refused_as_a_recipe_error(data: Mapping[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Recipe.from_dict(data)


def test_a_recipe_does_not_change() -> None:
    recipe = Recipe.image()
    with pytest.raises(Exception, match="frozen"):
        recipe.seed = 1  # type: ignore[misc]  # it is frozen


# --- what is refused, and how it says so --------------------------------------------------------


def _image(ops: str, **field: Any) -> dict[str, Any]:
    """A recipe of ops such as ``decode; resize size=8``, values in JSON."""
    listed = []
    for op in ops.split("; "):
        name, *given = op.split()
        values = (word.partition("=") for word in given)
        listed.append({"op": name, **{key: json.loads(value) for key, _, value in values}})
    return {"fields": {"image": {"ops": listed, **field}}}


FLOATS = 'decode; to_dtype dtype="float32"'
REFUSED: list[tuple[str | dict[str, Any], str]] = [
    ("decode; blur", "|".join(["fields.image.ops[1]", "'blur'", *(f"'{name}'" for name in OPS)])),
    ({"fields": {"image": {"ops": [{"size": 3}]}}}, "fields.image.ops[0]|op"),
    ("decode; resize siez=3 size=3", "resize|siez|unknown parameter|size, interpolation"),
    ("decode; resize", "ops[1].resize|size or max_size"),
    ('decode; center_crop size="big"', "center_crop.size|'big'"),
    ("decode; center_crop size=0", "center_crop.size|0"),
    (
        'decode; resize size=8 interpolation="area"',
        "interpolation|'area'|'bilinear'|'bicubic'|'nearest'",
    ),
    ('decode mode="CMYK"', "mode|'CMYK'|'RGB'|'L'"),
    ('decode mode="P"; resize size=8', 'resize|blend|interpolation = "nearest"'),
    (
        'decode mode="P"; random_resized_crop size=8',
        'random_resized_crop|blend|interpolation = "nearest"',
    ),
    (
        'decode; to_dtype dtype="float16"; resize size=8',
        'resize: bilinear does not blend values of float16|interpolation = "nearest"',
    ),
    ('decode mode="P" scaled=true', "scaled|as they are"),
    ("decode scaled=true; resize max_size=8", "scaled|max_size"),
    ('decode mode="unchanged" scaled=true', "scaled|as they are"),
    ('decode scaled=true; resize size=8 interpolation="nearest"', "scaled|as they are"),
    ('decode mode="unchanged" icc="srgb"', "icc|'unchanged'|keeps values"),
    ('decode mode="unchanged" bits=12', "bits|keeps all"),
    (
        _image('decode mode="unchanged"; to_dtype dtype="float32"', codec="image"),
        "'image'|uint8|float32",
    ),
    (
        'decode; function function="m:f" shape=[3,50,60]; center_crop size=[51,60]',
        "51 x 60|50 x 60",
    ),
    ("decode bits=20", "bits|20|16"),
    ('decode; to_dtype dtype="half"', "'half'|'float16'"),
    ('decode; to_dtype dtype="uint8" scale=true', "to_dtype|scale|float|uint8"),
    ("decode; horizontal_flip p=1.5", "p|1.5|1"),
    ("decode; random_resized_crop size=8 scale=[2,1]", "scale|[2.0, 1.0]|ascending"),
    ('function function="f"', "function|'f'"),
    ("horizontal_flip; decode", "decode must come first"),
    (
        "decode; resize size=200; center_crop size=224",
        "fields.image|224 x 224|200|resize to at least 224",
    ),
    ("decode; resize size=[300,200]; center_crop size=224", "224 x 224|300|200"),
    ("decode; center_crop size=100; center_crop size=101", "101 x 101|100"),
    (_image("decode", codec="jpeg2000"), "'jpeg2000'|'raw'|'zstd'|image"),
    (_image("decode", codec={"name": "zstd", "speed": 1}), "speed|unknown parameter|level"),
    (_image("decode", codec={"name": "raw", "level": 1}), "level|no parameter"),
    (_image("decode", codec={"name": "zstd", "level": 23}), "level|23|22"),
    (_image(FLOATS, codec="image"), "'image'|uint8|float32|zstd"),
    (_image('function function="m:f" shape=[8]', codec="image"), "'image'|(8,)"),
    (_image("decode", format="x"), "format|ops, codec, input"),
    ({**_image("decode"), "name": "x"}, "name|fields, seed"),
    ({"fields": {}}, "fields"),
    ({"fields": {"label": {"ops": []}}}, "'label'|row|valid"),
    ({"fields": {"c": {"ops": []}}}, "'c'|row"),
    ({"fields": {"../x": {"ops": []}}}, "'../x'|identifier"),
    (_image("decode", variants=2), "no op is random"),
    (_image("decode", first_variant=1), "no op is random"),
    (_image("horizontal_flip", variants=0), "is 0; give a whole number from 1"),
    (_image("horizontal_flip", variants=10**6), "is 1000000; the most is 1024"),
    (_image("horizontal_flip", first_variant=-1), "is -1; give a whole number"),
]
"""Ops of an image or a recipe, and parts of the refusal."""


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_a_wrong_recipe_names_the_place_the_value_and_the_choices(
    data: str | dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(_image(data) if isinstance(data, str) else data)
    text = str(caught.value)
    assert not [word for word in words.split("|") if word not in text], text
    assert "\n" not in text
    assert "pydantic" not in text


NO_FUNCTIONS = (
    "equalize", "ops.py", "my.ops.py", "ops..equalize", "ops.equalize:", "ops.2tone",
    "my ops:equalize", "ops:a:b", "ops:equalize\n", "",
)  # fmt: skip
NAME = "{!r} is not package.module:function; "


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resize(size=0), ["size"]),
        (lambda: Resize(size=8, sizes=9), ["sizes", "unknown parameter", "size, interpolation"]),
        (lambda: Resize(256), ["Resize takes parameters by name, as Resize(size=256)"]),
        (lambda: Decode("L"), ["as Decode(mode='L')"]),
        (lambda: Field(ops=({"op": "resize", "size": 8, "k": 1},)), ["ops[0]", "k", "size, inter"]),
        (lambda: Field(ops=("decode",)), ["ops[0]", "'decode'"]),
        (Recipe, ["there is no field", "[fields.image]"]),
        (lambda: Recipe.image(resize=100, crop=101), ["101 x 101", "100"]),
        (lambda: Recipe.image(interpolation="nearest"), ["give resize with it (--resize)"]),
        (lambda: Recipe.image(codec="png"), ["'png'", "'image'"]),
        *(
            (lambda value=value: Function(function="m:f", params={"a": value}), ["params"])
            for value in (float("nan"), {1, 2}, object())
        ),
        *(
            (partial(Function, function=name), [NAME.format(name) + way])
            for name, way in [
                ("ops.equalize", "write 'ops:equalize'"),
                ("my.ops.equalize", "write 'my.ops:equalize'"),
                *((name, "such as 'myops:equalize'") for name in NO_FUNCTIONS),
            ]
        ),
    ],
)
def test_python_gets_errors_with_the_place_and_the_way_to_write_it(
    make: Callable[[], Any], words: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        make()
    assert not [word for word in words if word not in str(caught.value)], caught.value


@pytest.mark.parametrize("module", ["a_year.2024.ops", "a_year.übung.ops", "_a._1", "ops_हिन्दी.कि"])
def test_names_of_what_can_be_imported_are_accepted(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / f"{module.replace('.', '/')}.py", b"def f(array): return array")
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module(module)
    assert Function(function=f"{module}:f") == Field(ops=(Decode(), imported.f)).ops[1]


def test_a_toml_file_may_have_a_byte_order_mark_and_one_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf[fields.image]\nops = [{op = 'decode'}]\n")
    assert Recipe.from_toml(marked) == Recipe.image()
    with pytest.raises(RecipeError, match=r"nowhere\.toml: No such file"):
        Recipe.from_toml(tmp_path / "nowhere.toml")
    with pytest.raises(RecipeError, match="Is a directory"):
        Recipe.from_toml(tmp_path)
    broken = tmp_path / "broken.toml"
    for content in (b"fields = ", b"\xff\xfe"):
        broken.write_bytes(content)
        with pytest.raises(RecipeError, match=r"broken.toml is not TOML"):
            Recipe.from_toml(broken)


# --- defaults -----------------------------------------------------------------------------------


IMAGE, ZSTD = ImageCodec(), ZstdCodec()


@pytest.mark.parametrize(
    ("ops", "dtype", "shape", "codec"),
    [
        ((Decode(),), "uint8", None, IMAGE),
        ((Decode(), Resize(size=8)), "uint8", None, IMAGE),
        ((Decode(), Resize(size=(8, 9))), "uint8", (3, 8, 9), IMAGE),
        ((Decode(mode="RGBA"), Resize(size=8), CenterCrop(size=5)), "uint8", (4, 5, 5), IMAGE),
        ((Decode(mode="L"), CenterCrop(size=8)), "uint8", (1, 8, 8), IMAGE),
        ((Decode(), CenterCrop(size=(8, 9)), Resize(size=4)), "uint8", None, IMAGE),
        (
            (Decode(mode="L"), RandomResizedCrop(size=7), HorizontalFlip()),
            "uint8", (1, 7, 7), IMAGE,
        ),
        ((Decode(), ToDType(dtype="float32")), "float32", None, ZSTD),
        ((Decode(), ToDType(dtype="float16", scale=True)), "float16", None, ZSTD),
        ((Decode(), Function(function="m:f", dtype="int32")), "int32", None, ZSTD),
        ((Decode(), Function(function="m:f", shape=(16,))), "uint8", (16,), ZSTD),
        (
            (Decode(), Function(function="m:f", shape=(5, 8, 9)), CenterCrop(size=4)),
            "uint8", (5, 4, 4), IMAGE,
        ),
        ((Decode(mode="unchanged"), Resize(size=(8, 9))), None, None, ZSTD),
        ((Decode(mode="unchanged"), CenterCrop(size=8)), None, None, ZSTD),
        ((Function(function="m:f", dtype="int8", shape=(4,)),), "int8", (4,), ZSTD),
        ((Function(function="m:f", shape=(8, 9, 5)), CenterCrop(size=4)), None, (4, 4, 5), ZSTD),
        ((Function(function="m:f"),), None, None, ZSTD),
        ((), None, None, ZSTD),
    ],
)  # fmt: skip
def test_the_ops_tell_dtype_and_shape_and_from_these_follows_the_codec(
    ops: tuple[Any, ...], dtype: str | None, shape: tuple[int, ...] | None, codec: Any
) -> None:
    field = Field(ops=ops)
    assert (field.dtype, field.shape, field.codec) == (dtype, shape, codec)


@pytest.mark.parametrize(("size", "side"), [(40, 40), ([30, 50], 50)])
def test_scaled_decoding_states_the_side_of_the_resize_behind_it(
    size: int | list[int], side: int
) -> None:
    field = Field(ops=({"op": "decode", "scaled": True}, {"op": "resize", "size": size}))
    assert field.ops[0] == Decode(scaled=side)
    assert Field.model_validate(field.model_dump()) == field
    assert Field(ops=(Decode(scaled=70), *field.ops[1:])).ops[0] == Decode(scaled=70)
    with pytest.raises(RecipeError, match=f"shrink to 7 .* less than the {side} .*scaled = true"):
        Field(ops=(Decode(scaled=7), *field.ops[1:]))
    assert Field(ops=(Decode(scaled=True),)).ops[0] == Decode(scaled=True)


STATED = {"op": "decode", "mode": "RGB", "bits": 16}


@pytest.mark.parametrize(
    ("ops", "is_open"),
    [
        ([{"op": "decode"}], True),
        ([{"op": "decode", "mode": "RGB"}], True),
        ([STATED, {"op": "center_crop", "size": 8}], False),
        ([STATED, {"op": "resize", "size": [8, 8]}], True),
        ([STATED, {"op": "resize", "size": [8, 8], "interpolation": "nearest"}], False),
    ],
)
def test_mode_bits_and_interpolation_decide_how_pixels_are_read(
    ops: list[dict[str, Any]], is_open: bool
) -> None:
    recipe = Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    assert recipe.leaves_pixels_open is is_open
