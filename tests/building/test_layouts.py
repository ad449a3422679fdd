"""Common layouts of data: most build without a flag, the others by what the refusal names."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precache
from tests.support.building import write
from tests.support.containers import quiet_datasets
from tests.support.layouts import ANIMALS, Builds, Labels, photo, put, put_classes, put_csv


def image_folder(root: Path) -> tuple[str, Labels]:
    put_classes(root / "photos")
    return "photos", ANIMALS


def jupyter_folder(root: Path) -> tuple[str, Labels]:
    put_classes(root / "photos")
    put(root / "photos", ".ipynb_checkpoints/a1.png", "cat/@eaDir/b1.png", "#recycle/x.png")
    return "photos", ANIMALS


def one_split(root: Path) -> tuple[str, Labels]:
    for split in ("train", "val"):
        put_classes(root / "photos" / split)
    return "photos/train", ANIMALS


def validation_split(root: Path) -> tuple[str, Labels]:
    for split in ("train", "val"):
        put_classes(root / "photos" / split)
    return "photos/val", ANIMALS


def splits(root: Path) -> tuple[str, Labels]:
    put_classes(root / "photos/train")
    put_classes(root / "photos/val", {"v1": "cat", "v2": "dog", "v3": "eel"})
    return "photos", ANIMALS


def flat_folder(root: Path) -> tuple[str, Labels]:
    put(root / "photos", "a.png", "b.png", "c.png")
    return "photos", dict.fromkeys("abc")


def nested_classes(root: Path) -> tuple[str, Labels]:
    put(root / "photos", "animal/cat/a.png", "animal/dog/b.png", "plant/oak/c.png")
    return "photos", {"a": "animal", "b": "animal", "c": "plant"}


def img2dataset_tars(root: Path) -> tuple[str, Labels]:
    for number in range(2):
        with tarfile.open(root / f"{number:05d}.tar", "w") as tar:
            for name in ("1", "2"):
                stem = f"{number:05d}{name}"
                for suffix, data in (("png", photo(stem)), ("txt", b"a"), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{stem}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return "{00000..00001}.tar", dict.fromkeys(("000001", "000002", "000011", "000012"))


def webdataset(root: Path) -> tuple[str, Labels]:
    labels = {"s1": 3, "s2": 0, "s3": 11}
    with tarfile.open(root / "train-0000.tar", "w") as tar:
        for name, label in labels.items():
            for suffix, data in (("png", photo(name)), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"train/{name}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return "train-0000.tar", labels


def tar_of_a_folder(root: Path) -> tuple[str, Labels]:
    put_classes(root / "photos")
    with tarfile.open(root / "photos.tar", "w") as tar:
        tar.add(root / "photos", "photos")
    return "photos.tar", ANIMALS


def hub_parquet(root: Path) -> tuple[str, Labels]:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["eel", "cat", "dog"])}
    )
    images = [{"bytes": photo(name), "path": f"{name}.png"} for name in ANIMALS]
    numbers = [["eel", "cat", "dog"].index(label) for label in ANIMALS.values()]
    with quiet_datasets():
        data = datasets.Dataset.from_dict({"image": images, "label": numbers}, features)
        data.to_parquet(str(root / "train-00000-of-00001.parquet"))
    return "train-00000-of-00001.parquet", ANIMALS


def hub_parquet_of_two_splits(root: Path) -> tuple[str, Labels]:
    for split, names in (("train", "abc"), ("test", "d")):
        table = pa.table({"image": [*map(photo, names)], "id": [*names], "label": [7] * len(names)})
        pq.write_table(table, write(root / f"data/{split}-00000-of-00001.parquet", b""))
    return "'data/*.parquet' --key-column id", dict.fromkeys("abc", 7)


def saved_dataset(root: Path) -> tuple[str, Labels]:
    images = [{"bytes": photo(name), "path": f"{name}.png"} for name in ANIMALS]
    with quiet_datasets():
        data = datasets.Dataset.from_dict({"image": images, "label": list(ANIMALS.values())})
        data.save_to_disk(root / "saved")
    return "saved", ANIMALS


def voc(root: Path) -> tuple[str, Labels]:
    put(root / "VOC2012", "JPEGImages/a.png", "JPEGImages/b.png", "SegmentationClass/a.png")
    write(root / "VOC2012/Annotations/a.xml", b"<annotation/>")
    return "VOC2012/JPEGImages", dict.fromkeys("ab")


def coco(root: Path) -> tuple[str, Labels]:
    put(root / "coco", "train2017/a.png", "train2017/b.png", "val2017/c.png")
    write(root / "coco/annotations/instances_train2017.json", b"{}")
    return "coco/train2017", dict.fromkeys("ab")


def birds(root: Path) -> tuple[str, Labels]:
    put(root / "CUB_200_2011", "images/001.Albatross/a.png", "images/002.Auklet/b.png")
    for name in ("images.txt", "classes.txt", "train_test_split.txt", "attributes/a.txt"):
        write(root / "CUB_200_2011" / name, b"1 1\n")
    return "CUB_200_2011", {"a": "001.Albatross", "b": "002.Auklet"}


def digits(root: Path) -> tuple[str, Labels]:
    labels = {f"d{number}": str(number) for number in range(10)}
    put_classes(root / "mnist", labels)
    return "mnist", labels


def spreadsheet(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png")
    lines = "path,label,note", "a.png,0,", "b.png,,x", "c.png,12,", ",,", ",,"
    put_csv(root / "list.csv", *lines, mark="\ufeff")
    return "list.csv", {"a": 0, "b": None, "c": 12}


def semicolons(root: Path) -> tuple[str, Labels]:
    put(root, *(f"{name}.png" for name in ANIMALS))
    put_csv(root / "list.csv", "path;label", *(f"{n}.png;{c}" for n, c in ANIMALS.items()))
    return "list.csv", ANIMALS


def labels_beside(root: Path) -> tuple[str, Labels]:
    put(root / "photos", *(f"{name}.png" for name in ANIMALS))
    put_csv(root / "labels.csv", "filename,label", *(f"{n}.png,{c}" for n, c in ANIMALS.items()))
    return "photos --labels labels.csv", ANIMALS


def kaggle(root: Path) -> tuple[str, Labels]:
    put(root / "kaggle/train", *(f"{name}.png" for name in ANIMALS))
    put(root / "kaggle/test", "t.png")
    put_csv(root / "kaggle/train.csv", "id,label", *(f"{n},{c}" for n, c in ANIMALS.items()))
    return "kaggle/train --labels kaggle/train.csv", ANIMALS


def mac_zip(root: Path) -> tuple[str, Labels]:
    with zipfile.ZipFile(root / "photos.zip", "w") as archive:
        for name, label in ANIMALS.items():
            archive.writestr(f"photos/{label}/{name}.png", photo(name))
            archive.writestr(f"__MACOSX/photos/{label}/._{name}.png", b"\0\5\x16\7")
            archive.writestr(f"__MACOSX/photos/{label}/{name}.png", b"\0\5\x16\7")
        archive.writestr("photos/.DS_Store", b"x")
    return "photos.zip", ANIMALS


def several_joined(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png")
    put_csv(root / "list.csv", "image,labels", "a.png,cat|dog", "b.png,cat", "c.png,dog|eel")
    return "list.csv", {"a": {"cat", "dog"}, "b": {"cat"}, "c": {"dog", "eel"}}


def one_hot(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png")
    put_csv(root / "list.csv", "image,eel,cat", "a.png,0.0,1.0", "b.png,1.0,0.0", "c.png,1.0,0.0")
    return "list.csv", {"a": "cat", "b": "eel", "c": "eel"}


def regression(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png")
    put_csv(root / "list.csv", "path,target", "a.png,0.5", "b.png,", "c.png,-2")
    return "list.csv", {"a": 0.5, "b": None, "c": -2.0}


def metadata_lines(root: Path) -> tuple[str, Labels]:
    put(root / "photos", *(f"{name}.png" for name in ANIMALS))
    rows = [{"file_name": f"{n}.png", "label": c, "text": "t"} for n, c in ANIMALS.items()]
    put_csv(root / "photos/metadata.jsonl", *map(json.dumps, rows))
    return "photos/metadata.jsonl", ANIMALS


def plain_parquet(root: Path) -> tuple[str, Labels]:
    table = {"image": [photo(n) for n in ANIMALS], "label": ["cat", None, "dog", "cat"]}
    pq.write_table(pa.table({**table, "id": list(ANIMALS)}), root / "a.parquet")
    return "a.parquet --key-column id", dict(zip(ANIMALS, table["label"], strict=True))


def masks(root: Path) -> tuple[str, Labels]:
    put(root / "data", "images/a.png", "images/b.png", "masks/a.png", "masks/b.png")
    return "data", dict.fromkeys("ab")


def food(root: Path) -> tuple[str, Labels]:
    put(root / "food-101", *(f"images/{label}/{name}.png" for name, label in ANIMALS.items()))
    put_csv(root / "food-101/meta/train.txt", *(f"{c}/{n}" for n, c in ANIMALS.items()))
    put_csv(root / "food-101/meta/classes.txt", "cat", "dog", "eel")
    return "food-101", ANIMALS


def splits_with_metadata(root: Path) -> tuple[str, Labels]:
    rows = [f"{name}.png,{label},x" for name, label in ANIMALS.items()]
    for split in ("train", "test"):
        put(root / f"hub/{split}", *(f"{name}.png" for name in ANIMALS))
        put_csv(root / f"hub/{split}/metadata.csv", "file_name,label,additional", *rows)
    return "hub/train/metadata.csv", ANIMALS


def chest_xrays(root: Path) -> tuple[str, Labels]:
    labels = {"0_0": {"Edema", "Mass"}, "0_1": {"Mass"}, "1_0": {"No Finding"}, "2_0": {"Mass"}}
    for number, name in enumerate(labels):
        put(root / f"nih/images_00{number // 2}/images", f"{name}.png")
    rows = (f"{name}.png,{'|'.join(sorted(some))},{name[0]}" for name, some in labels.items())
    put_csv(root / "nih/Data_Entry_2017.csv", "Image Index,Finding Labels,Patient ID", *rows)
    return "nih --labels nih/Data_Entry_2017.csv", labels


def findings(root: Path) -> tuple[str, Labels]:
    labels = {"v1": {"No Finding"}, "v2": {"Edema"}, "v3": {"No Finding", "Mass"}}
    rows = []
    for name, bits in zip(labels, ("1.0,,-1.0", "0.0,1.0,", "1.0,,1.0"), strict=True):
        path = f"CheX-small/train/patient{name}/study1/{name}.png"
        put(root, path)
        rows.append(f"{path},Male,60,{bits}")
    put_csv(root / "CheX-small/train.csv", "Path,Sex,Age,No Finding,Edema,Mass", *rows)
    return "CheX-small/train --labels CheX-small/train.csv", labels


def findings_as_the_source(root: Path) -> tuple[str, Labels]:
    findings(root)
    source = "CheX-small/train.csv --label-column Edema --label-kind number"
    return source, {"v1": None, "v2": "1", "v3": None}


def pandas_integers(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png")
    put_csv(root / "list.csv", "path,label", "a.png,0.0", "b.png,", "c.png,12.0")
    return "list.csv", {"a": 0, "b": None, "c": 12}


def two_columns_of_images(root: Path) -> tuple[str, Labels]:
    put(root, "a.png", "b.png", "c.png", "d.png")
    put_csv(root / "list.csv", "path,file,label", "a.png,c.png,cat", "b.png,d.png,dog")
    return "list.csv", {"a": "cat", "b": "dog"}


def a_table_beside_a_folder(root: Path) -> tuple[str, Labels]:
    put(root / "kaggle/train", *(f"{name}.png" for name in ANIMALS))
    put(root / "kaggle/test", "t.png")
    put_csv(root / "kaggle/train.csv", "Id,label", *(f"{n},{c}" for n, c in ANIMALS.items()))
    return "kaggle/train.csv", ANIMALS


def land_use(root: Path) -> tuple[str, Labels]:
    put_classes(root / "EuroSAT/2750")
    names = (f"{c}/{n}.png" for n, c in ANIMALS.items())
    rows = (
        f"{n},{name},{c}" for n, (name, c) in enumerate(zip(names, ANIMALS.values(), strict=True))
    )
    put_csv(root / "EuroSAT/train.csv", ",Filename,ClassName", *rows)
    return "EuroSAT/train.csv --label-column ClassName", ANIMALS


def eyes(root: Path) -> tuple[str, Labels]:
    labels = {f"{n}_{side}": n % 3 for n in range(3) for side in ("left", "right")}
    put(root / "eyes/train", *(f"{name}.png" for name in labels))
    put_csv(root / "eyes/trainLabels.csv", "image,level", *(f"{n},{c}" for n, c in labels.items()))
    return "eyes/trainLabels.csv", {name: str(level) for name, level in labels.items()}


def lesions(root: Path) -> tuple[str, Labels]:
    for number, name in enumerate(ANIMALS):
        put(root / f"ham/images_part_{1 + number % 2}", f"{name}.png")
    rows = (f"{n},{c},histo" for n, c in ANIMALS.items())
    put_csv(root / "ham/metadata.csv", "image_id,dx,dx_type", *rows)
    return "ham/metadata.csv", ANIMALS


def pets(root: Path) -> tuple[str, Labels]:
    names = [f"{breed}_{number}" for breed in ("Bengal", "boxer") for number in range(3)]
    put(root / "pets/images", *(f"{name}.png" for name in names))
    rows = (f"{name} {1 + name.startswith('b')} {1 + n % 2} 1" for n, name in enumerate(names))
    put_csv(root / "pets/annotations/list.txt", "#Image CLASS-ID SPECIES BREED ID", *rows)
    labels = {name: str(1 + name.startswith("b")) for name in names}
    return "pets/images --labels pets/annotations/list.txt", labels


def street_scenes(root: Path) -> tuple[str, Labels]:
    names = [f"{city}_{number}_19" for city in ("aachen", "bochum") for number in range(2)]
    for split, name in itertools.product(("train", "val"), names):
        place = f"{split}/{name.partition('_')[0]}/{name}"
        put(root / "city", f"leftImg8bit/{place}_leftImg8bit.png")
        put(root / "city", *(f"gtFine/{place}_gtFine_{end}.png" for end in ("labelIds", "color")))
    labels = {f"{name}_leftImg8bit": name.partition("_")[0] for name in names}
    return "city", labels


def celebrities(root: Path) -> tuple[str, Labels]:
    labels = {"0": {"Young"}, "1": {"Bald", "Young"}, "2": {"Young"}, "3": {"Bald"}}
    put(root / "celeba/img_align_celeba", *(f"{name}.png" for name in labels))
    bits = ([1 if name in of else -1 for name in ("Bald", "Young")] for of in labels.values())
    rows = (f"{name}.png,{bald},{young}" for name, (bald, young) in zip(labels, bits, strict=True))
    put_csv(root / "celeba/list_attr_celeba.csv", "image_id,Bald,Young", *rows)
    return "celeba/list_attr_celeba.csv", labels


def semicolons_of_a_spreadsheet(root: Path) -> tuple[str, Labels]:
    put(root / "sheet", *(f"{name}.png" for name in ANIMALS))
    rows = (f"{n}.png;{c};{number},5" for number, (n, c) in enumerate(ANIMALS.items()))
    put_csv(root / "sheet/list.csv", "Dateiname;Klasse;Gewicht", *rows, mark="\ufeff")
    return "sheet --labels sheet/list.csv", ANIMALS


def splits_with_labels(root: Path) -> tuple[str, Labels]:
    put(root / "kaggle", *(f"train/{name}.png" for name in ANIMALS), "test/t.png", "test/u.png")
    put_csv(root / "kaggle/train.csv", "id,label", *(f"{n},{c}" for n, c in ANIMALS.items()))
    return "kaggle --labels kaggle/train.csv", ANIMALS


Layout = Callable[[Path], tuple[str, Labels]]

PLAIN: list[Layout] = [
    image_folder, jupyter_folder, one_split, validation_split, flat_folder, nested_classes,
    img2dataset_tars, webdataset, tar_of_a_folder, hub_parquet, saved_dataset, voc, coco, birds,
    digits, spreadsheet, semicolons, labels_beside, kaggle, mac_zip, regression, metadata_lines,
    plain_parquet, food, splits_with_metadata,
]  # fmt: skip
REFUSED: list[Layout] = [
    splits, hub_parquet_of_two_splits, masks, several_joined, one_hot, pandas_integers,
    chest_xrays, findings, findings_as_the_source, two_columns_of_images, a_table_beside_a_folder,
    land_use, splits_with_labels, eyes, lesions, pets, street_scenes, celebrities,
    semicolons_of_a_spreadsheet,
]  # fmt: skip


def test_there_are_enough_layouts_without_a_flag() -> None:
    assert len(PLAIN) >= 21
    assert len(PLAIN) + len(REFUSED) >= 25


@pytest.mark.parametrize("layout", PLAIN)
def test_a_common_layout_builds_without_a_flag(layout: Layout, builds: Builds) -> None:
    source, labels = layout(builds.root)
    assert builds.labels(source) == labels


@pytest.mark.parametrize("layout", REFUSED)
def test_the_refusal_of_another_prints_the_command_that_builds_it(
    layout: Layout, builds: Builds
) -> None:
    source, labels = layout(builds.root)
    assert builds.choices(source)[0] == labels


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("f_2.png", "f_10.png"), "Rows are in the order of text: f_10.png comes before f_2.png; "),
        (("f_02.png", "f_10.png"), ""),
        (("a10/2.png", "a9/1.png"), "a10/2.png comes before a9/1.png; "),
    ],
)
def test_an_order_that_is_kept_and_not_that_of_the_numbers_is_said(
    builds: Builds, names: tuple[str, ...], said: str
) -> None:
    put(builds.root / "in", *names)
    listed = [f"in/{name}" for name in names]
    put_csv(builds.root / "in.csv", "image", *listed)
    for source, keys in (("in", sorted(names)), ("in.csv", [*names])):
        builds.labels(source, "--keep-order")
        [store] = builds.root.glob(f"{1 + (source == 'in.csv')}.store")
        assert [key.removeprefix("in/") for key in precache.open(store).keys] == keys
        assert (said in builds.printed) == (source == "in" or not said)
        assert ("order of text" in builds.printed) == (source == "in" and bool(said))
