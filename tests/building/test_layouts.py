"""Common layouts of data: most build without a flag, the others by what the refusal names."""

import json
import zipfile
from pathlib import Path

import datasets
import pytest

import precache
from tests.building.cases import IN_CLASSES, READ_ANIMALS, Case, files, packed, parquet, read, tar
from tests.support.containers import quiet_datasets, write_tar
from tests.support.layouts import ANIMALS, Builds, photo, put, put_csv

FLAT = " ".join(f"{{0}}/{name}.png" for name in ANIMALS)
LINES = " ".join(f"{name}.png,{label}" for name, label in ANIMALS.items())
NO_SUFFIX = LINES.replace(".png", "")
SPLITS = " ".join(IN_CLASSES.format(f"photos/{split}") for split in ("train", "val"))
CITIES = [f"{city}_{number}_19" for city in ("aachen", "bochum") for number in range(2)]
METADATA = (
    json.dumps({"file_name": f"{n}.png", "label": c, "text": "t"}) for n, c in ANIMALS.items()
)


def img2dataset_tars(root: Path) -> str:
    for number in range(2):
        stems = [f"{number:05d}{name}" for name in "12"]
        members = [
            (f"{stem}.{suffix}", data)
            for stem in stems
            for suffix, data in (("png", photo(stem)), ("txt", b"a"), ("json", b"{}"))
        ]
        write_tar(root / f"{number:05d}.tar", members)
    return "{00000..00001}.tar"


def hub_parquet(root: Path) -> str:
    names = ["eel", "cat", "dog"]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    images = [{"bytes": photo(name), "path": f"{name}.png"} for name in ANIMALS]
    numbers = [names.index(label) for label in ANIMALS.values()]
    with quiet_datasets():
        data = datasets.Dataset.from_dict(
            {"image": images, "label": numbers}, datasets.Features(features)
        )
        data.to_parquet(str(root / "train-00000-of-00001.parquet"))
    return "train-00000-of-00001.parquet"


def mac_zip(root: Path) -> str:
    with zipfile.ZipFile(root / "photos.zip", "w") as archive:
        for name, label in ANIMALS.items():
            archive.writestr(f"photos/{label}/{name}.png", photo(name))
            archive.writestr(f"__MACOSX/photos/{label}/._{name}.png", b"\0\5\x16\7")
            archive.writestr(f"__MACOSX/photos/{label}/{name}.png", b"\0\5\x16\7")
        archive.writestr("photos/.DS_Store", b"x")
    return "photos.zip"


PLAIN: dict[str, tuple[Case, str]] = {
    "image folder": (files(IN_CLASSES.format("photos"), "photos"), READ_ANIMALS),
    "one split": (files(SPLITS, "photos/train"), READ_ANIMALS),
    "flat folder": (files("photos/a.png photos/b.png photos/c.png", "photos"), "a b c"),
    "nested classes": (
        files("in/animal/cat/a.png in/animal/dog/b.png in/plant/oak/c.png", "in"),
        "a,b=animal c=plant",
    ),
    "img2dataset": (img2dataset_tars, "000001 000002 000011 000012"),
    "webdataset": (
        tar("train/s1.png train/s2.png train/s3.png",
            {"train/s1": "3", "train/s2": "0", "train/s3": "11"}), "s1=3 s2=0 s3=11",
    ),
    "tar of a folder": (packed(files(IN_CLASSES.format("in/photos"), "in"), "tar"), READ_ANIMALS),
    "Parquet of the Hub": (hub_parquet, READ_ANIMALS),
    "VOC": (
        files("VOC2012/JPEGImages/a.png VOC2012/JPEGImages/b.png VOC2012/SegmentationClass/a.png",
              "VOC2012/JPEGImages", {"VOC2012/Annotations/a.xml": "<annotation/>"}), "a b",
    ),
    "COCO": (
        files("coco/train2017/a.png coco/train2017/b.png coco/val2017/c.png", "coco/train2017",
              {"coco/annotations/instances_train2017.json": "{}"}), "a b",
    ),
    "birds": (
        files("CUB/images/001.Albatross/a.png CUB/images/002.Auklet/b.png", "CUB",
              {f"CUB/{name}.txt": "1,1" for name in ("images", "classes", "attributes/a")}),
        "a=001.Albatross b=002.Auklet",
    ),
    "digits": (
        files(" ".join(f"mnist/{n}/d{n}.png" for n in range(10)), "mnist"),
        " ".join(f"d{n}='{n}'" for n in range(10)),
    ),
    "spreadsheet": (
        files("a.png b.png c.png", "list.csv",
              {"list.csv": "\ufeffpath,label,note a.png,0, b.png,,x c.png,12, ,, ,,"}),
        "a=0 b c=12",
    ),
    "semicolons": (
        files(FLAT.replace("{0}/", ""), "list.csv",
              {"list.csv": f"path;label {LINES.replace(',', ';')}"}), READ_ANIMALS,
    ),
    "labels beside": (
        files(FLAT.format("photos"), "photos --labels labels.csv",
              {"labels.csv": f"filename,label {LINES}"}), READ_ANIMALS,
    ),
    "Kaggle": (
        files(FLAT.format("kaggle/train") + " kaggle/test/t.png",
              "kaggle/train --labels kaggle/train.csv",
              {"kaggle/train.csv": f"id,label {NO_SUFFIX}"}), READ_ANIMALS,
    ),
    "zip of a Mac": (mac_zip, READ_ANIMALS),
    "regression": (
        files("a.png b.png c.png", "list.csv",
              {"list.csv": "path,target a.png,0.5 b.png, c.png,-2"}), "a=0.5 b c=-2.0",
    ),
    "lines of metadata": (
        files(FLAT.format("photos"), "photos/metadata.jsonl",
              {"photos/metadata.jsonl": "\n".join(METADATA)}), READ_ANIMALS,
    ),
    "Parquet": (parquet(label=["cat", None, "dog"]), "a=cat b c=dog"),
    "food": (
        files(IN_CLASSES.format("food/images"), "food",
              {"food/meta/train.txt": "cat/a1 eel/b2", "food/meta/classes.txt": "cat dog eel"}),
        READ_ANIMALS,
    ),
    "splits with metadata": (
        files(FLAT.format("hub/train") + " " + FLAT.format("hub/test"), "hub/train/metadata.csv",
              {f"hub/{split}/metadata.csv":
               "file_name,label,additional " + " ".join(f"{line},x" for line in LINES.split())
               for split in ("train", "test")}), READ_ANIMALS,
    ),
}  # fmt: skip

XRAYS = "patientv1/study1/v1 patientv2/study1/v2 patientv3/study1/v3"
FINDINGS: tuple[str, dict[str, str]] = (
    " ".join(f"CheX/train/{name}.png" for name in XRAYS.split()),
    {"CheX/train.csv": "Path,Sex,Age,No Finding,Edema,Mass\n" + "\n".join(
        f"CheX/train/{name}.png,Male,60,{bits}"
        for name, bits in zip(XRAYS.split(), ("1.0,,-1.0", "0.0,1.0,", "1.0,,1.0"), strict=True)
    )},
)  # fmt: skip

REFUSED: dict[str, tuple[Case, str]] = {
    "splits": (files(SPLITS.replace("val/cat/a1", "val/cat/v1"), "photos"), READ_ANIMALS),
    "masks": (
        files("data/images/a.png data/images/b.png data/masks/a.png data/masks/b.png", "data"),
        "a b",
    ),
    "several classes, joined": (
        files("a.png b.png c.png", "list.csv",
              {"list.csv": "image,labels a.png,cat|dog b.png,cat c.png,dog|eel"}),
        "a={cat+dog} b={cat} c={dog+eel}",
    ),
    "a column each": (
        files("a.png b.png c.png", "list.csv",
              {"list.csv": "image,eel,cat a.png,0.0,1.0 b.png,1.0,0.0 c.png,1.0,0.0"}),
        "a=cat b,c=eel",
    ),
    "integers of pandas": (
        files("a.png b.png c.png", "list.csv",
              {"list.csv": "path,label a.png,0.0 b.png, c.png,12.0"}), "a=0 b c=12",
    ),
    "X-rays": (
        files("nih/images_000/images/0_0.png nih/images_000/images/0_1.png "
              "nih/images_001/images/1_0.png nih/images_001/images/2_0.png",
              "nih --labels nih/Data_Entry_2017.csv",
              {"nih/Data_Entry_2017.csv": "Image Index,Finding Labels,Patient ID\n"
               "0_0.png,Edema|Mass,0\n0_1.png,Mass,0\n1_0.png,No Finding,1\n2_0.png,Mass,2"}),
        "0_0={Edema+Mass} 0_1,2_0={Mass} 1_0={No~Finding}",
    ),
    "findings": (
        files(FINDINGS[0], "CheX/train --labels CheX/train.csv", FINDINGS[1]),
        "v1={No~Finding} v2={Edema} v3={No~Finding+Mass}",
    ),
    "splits with labels": (
        files(FLAT.format("kaggle/train") + " kaggle/test/t.png kaggle/test/u.png",
              "kaggle --labels kaggle/train.csv", {"kaggle/train.csv": f"id,label {NO_SUFFIX}"}),
        READ_ANIMALS,
    ),
    "pets": (
        files(" ".join(f"pets/images/{b}_{n}.png" for b in ("Bengal", "boxer") for n in range(3)),
              "pets/images --labels pets/annotations/list.txt",
              {"pets/annotations/list.txt": "#Image CLASS-ID SPECIES BREED ID\n" + "\n".join(
                  f"{breed}_{n} {1 + i} {1 + n % 2} 1"
                  for i, breed in enumerate(("Bengal", "boxer")) for n in range(3))}),
        "Bengal_0,Bengal_1,Bengal_2='1' boxer_0,boxer_1,boxer_2='2'",
    ),
    "street scenes": (
        files(" ".join(
            f"city/leftImg8bit/{split}/{name[:6]}/{name}_leftImg8bit.png "
            f"city/gtFine/{split}/{name[:6]}/{name}_gtFine_labelIds.png "
            f"city/gtFine/{split}/{name[:6]}/{name}_gtFine_color.png"
            for split in ("train", "val") for name in CITIES), "city"),
        " ".join(f"{name}_leftImg8bit={name[:6]}" for name in CITIES),
    ),
    "semicolons of a spreadsheet": (
        files(FLAT.format("sheet"), "sheet --labels sheet/list.csv",
              {"sheet/list.csv": "\ufeffDateiname;Klasse;Gewicht " + " ".join(
                  f"{line.replace(',', ';')};{n},5" for n, line in enumerate(LINES.split()))}),
        READ_ANIMALS,
    ),
}  # fmt: skip


TABLES: dict[str, tuple[str, Case, str]] = {
    "findings as the source": (
        "CheX/train",
        files(FINDINGS[0], "CheX/train.csv --label-column Edema --label-kind number", FINDINGS[1]),
        "v1 v2='1' v3",
    ),
    "land use": (
        "EuroSAT/2750",
        files(IN_CLASSES.format("EuroSAT/2750"), "EuroSAT/train.csv --label-column ClassName",
              {"EuroSAT/train.csv": ",Filename,ClassName " + " ".join(
                  f"{n},{c}/{name}.png,{c}" for n, (name, c) in enumerate(ANIMALS.items()))}),
        READ_ANIMALS,
    ),
    "eyes": (
        "eyes/train",
        files(" ".join(f"eyes/train/{n}_{side}.png" for n in range(3) for side in "lr"),
              "eyes/trainLabels.csv", {"eyes/trainLabels.csv": "image,level " + " ".join(
                  f"{n}_{side},{n}" for n in range(3) for side in "lr")}),
        "0_l,0_r='0' 1_l,1_r='1' 2_l,2_r='2'",
    ),
    "lesions": (
        "ham",
        files(FLAT.format("ham/part_1").replace("part_1/b", "part_2/b"), "ham/metadata.csv",
              {"ham/metadata.csv": "image_id,dx,dx_type " + " ".join(
                  f"{line},histo" for line in NO_SUFFIX.split())}), READ_ANIMALS,
    ),
    "celebrities": (
        "celeba/img_align_celeba",
        files("celeba/img_align_celeba/0.png celeba/img_align_celeba/1.png "
              "celeba/img_align_celeba/2.png celeba/img_align_celeba/3.png",
              "celeba/list_attr_celeba.csv", {"celeba/list_attr_celeba.csv":
              "image_id,Bald,Young 0.png,-1,1 1.png,1,1 2.png,-1,1 3.png,1,-1"}),
        "0,2={Young} 1={Bald+Young} 3={Bald}",
    ),
}  # fmt: skip
"""Tables beside the folder whose images they label, and that folder."""


@pytest.mark.parametrize("layout", PLAIN)
def test_a_common_layout_builds_without_a_flag(layout: str, builds: Builds) -> None:
    case, labels = PLAIN[layout]
    assert builds.labels(case(builds.root)) == read(labels)


@pytest.mark.parametrize("layout", REFUSED)
def test_the_refusal_of_another_prints_the_command_that_builds_it(
    layout: str, builds: Builds
) -> None:
    case, labels = REFUSED[layout]
    assert builds.choices(case(builds.root))[0] == read(labels)


@pytest.mark.parametrize("layout", TABLES)
def test_a_table_whose_files_are_not_there_labels_the_folder_that_has_them(
    layout: str, builds: Builds
) -> None:
    folder, case, labels = TABLES[layout]
    table, *flags = case(builds.root).split()
    assert builds.refused(" ".join([table, *flags])) == []
    assert "build that folder with --labels" in " ".join(builds.printed.split())
    labelled = " ".join([folder, "--labels", table, *flags])  # the advice
    is_clear = layout not in ("lesions", "celebrities")
    built = builds.labels(labelled) if is_clear else builds.choices(labelled)[0]
    assert built == read(labels)


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
