"""Labels that can be read in two ways: refused, and each command that the refusal prints builds."""

import itertools
import json
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precache
from precache.errors import ChoiceError, SourceError
from precache.storage.open import open_folder
from precache.store.columns import Texts
from precache_workers.sources.base import LabelRules
from precache_workers.sources.label_readings import read_folders
from precache_workers.sources.splits import differing_in, notes_of_folders
from tests.building.cases import (
    IN_CLASSES,
    READ_ANIMALS,
    Case,
    Reading,
    files,
    pack,
    packed,
    parquet,
    tar,
)
from tests.support.building import write
from tests.support.containers import lmdb_of, quiet_datasets, write_tar
from tests.support.layouts import (
    ANIMALS,
    Builds,
    built_labels,
    commands_in,
    photo,
    put,
    put_classes,
    put_csv,
)
from tests.support.servers import S3Server

# --- readings of one source ---------------------------------------------------------------------

TRAIN = "photos/train/cat/a.png photos/train/dog/b.png photos/train/eel/c.png "
VAL = f"{TRAIN} photos/val/dog/v1.png photos/val/eel/v2.png"
VALIDATED = "v1=dog v2=eel"
ABC = "a.png b.png c.png"
IN_ABC = "in/a.png in/b.png in/c.png"
SIGNS = "image_id,Smiling,Young,x a.png,1,-1,7 b.png,-1,-1,8 c.png,1,1,9"
SIGNED = "a={Smiling} b={} c={Smiling+Young}"
NUMBERED = "numbered from this source alone"
TAKEN = "Samples of several splits are taken together: folders 'train', 'val'"
SPLIT_LINES = "path,label,split a.png,cat,train b.png,dog,val"
NO_CLASS = "no folder is a class: {} (--label-level 1 for one class)"
LOOK_LIKE_SPLITS = "has 'train', 'val', which look like splits"


def typed(kind: Any, *values: Any) -> Case:
    return parquet(label=pa.array(values, kind))


REFUSED: dict[str, Reading] = {
    # folders
    "the only class, beside a folder that cannot be read": Reading(
        files("in/cat/a.png in/cat/b.png", "in", {"in/dog/1.jxl": "x"}),
        "a,b=cat | a,b=cat", "no image can be read in 'dog'", "cat dog|cat",
    ),
    "the only class of a folder, beside one that cannot be read": Reading(
        files("in/of/cat/a.png in/of/cat/b.png", "in", {"in/of/dog/1.jxl": "x"}),
        "a,b=cat | a,b=cat", "no image can be read in 'dog'", "cat dog|cat",
    ),
    "a level of no folder": Reading(
        files("in/x/cat/a.png in/y/dog/b.png", "in --label-level 3"),
        "a=cat b=dog | a=x b=y | a b", "no image of",
    ),
    "a level of no folder of an archive": Reading(
        packed(files("in/x/cat/a.png in/y/dog/b.png", "in --label-level 3"), "zip"),
        "a=cat b=dog | a=x b=y | a b", "no image of",
    ),
    "a folder whose name begins with a dash": Reading(
        files(f"{IN_CLASSES} {IN_CLASSES.replace('{0}', '{1}')}".format("-in/train", "-in/val"),
              "./-in"), f"{READ_ANIMALS} | * | * | *",
    ),
    "a copy of the classes beside them": Reading(
        files("in/no/a.png in/yes/b.png in/all/no/c.png in/all/yes/d.png", "in"),
        "c=no d=yes | a b c=no d=yes | a=no b=yes c,d=all | a b c d",
        "folders in 'all' are called as those beside it ('all', 'no', 'yes')",
    ),
    **{f"images and masks within classes, of {source}": Reading(
        files("in/ill/images/a.png in/ill/masks/a.png in/well/images/b.png in/well/masks/b.png",
              source), "a=ill b=well", "a column of each, and the classes 'ill', 'well'",
    ) for source in ("in", "'in/{**/images/*,**/masks/*}'")},
    "images and masks within splits, as columns": Reading(
        files("in/train/images/a.png in/train/masks/a.png in/val/images/b.png in/val/masks/b.png",
              "'in/{**/images/*,**/masks/*}'"),
        "a | a=train b=val | a b", "look like splits|!is refused, too",
    ),
    "numbers of splits as the labels of a file": Reading(
        files("in/a.png in/b.png in/c.png", "in --labels l.csv",
              {"l.csv": "image_id,partition a.png,0 b.png,1 c.png,2"}),
        "a='0' b='1' c='2'", "are '0', '1', '2' in the column 'partition', which look like splits",
    ),
    "a list without names of columns, by the first row": Reading(
        files(IN_ABC, "l.csv --image-column in/a.png", {"l.csv": "in/a.png,cat in/b.png,dog"}),
        "", "has no names of columns, as its first line has 'in/a.png': write a line above it",
    ),
    "class numbers that are identifiers": Reading(
        files(IN_ABC, "in --labels l.csv", {"l.csv": "a.png,142820 b.png,142821 c.png,142820"}), "",
        "or take the numbers as names (--label-kind name)",
    ),
    "names that look alike": Reading(
        files("in/01/0.png in/1/1.png", "in"), "0='01' 1='1'", "rename one; or list the names",
    ),
    "names in upper and lower case": Reading(
        files("in/cat/0.png in/Cat/1.png", "in"), "", "rename one; or list the names",
    ),
    # validation sets
    "a validation set that lacks a class": Reading(
        files(f"{VAL} photos/train/.hidden/x/a.png", "photos/val",
              {"photos/train/about/it.txt": "x"}), f"{VALIDATED} | {VALIDATED}", "lacks 'cat'",
        "cat dog eel|dog eel",
    ),
    "a validation set in a folder of its own": Reading(
        files(re.sub(r"(train|val)/", r"\1/imgs/", VAL), "photos/val"),
        f"{VALIDATED} | {VALIDATED}", "lacks 'cat'", "cat dog eel|dog eel",
    ),
    "a folder of a validation set": Reading(
        files(re.sub(r"(train|val)/", r"\1/imgs/", VAL), "photos/val/imgs"),
        f"{VALIDATED} | {VALIDATED}", "lacks 'cat'", "cat dog eel|dog eel",
    ),
    "a validation set with a class of no image": Reading(
        files(VAL, "photos/val", {"photos/val/cat/v3.jxl": "x"}), f"{VALIDATED} | {VALIDATED}",
        "", "cat dog eel|cat dog eel",
    ),
    "a validation set with more classes": Reading(
        files("photos/train/cat/a.png photos/train/dog/b.png photos/val/cat/c.png "
              "photos/val/eel/d.png photos/val/dog/e.png", "photos/val"),
        "c=cat d=eel e=dog", "has 'eel' besides",
    ),
    # columns
    "two columns of labels by their names": Reading(
        files(ABC, "two.csv", {"two.csv":
              "path,fineLabel,class_id,n_label a.png,1,x,3 b.png,0,x,3 c.png,2,y,4"}),
        "a=1 b=0 c=2 | a,b=x c=y",
    ),
    "two columns of labels of a Parquet file": Reading(
        parquet(fine_label=[1, 0, 2], coarse_label=[0, 0, 1]), "a=1 b=0 c=2 | a,b=0 c=1",
    ),
    "names, and numbers in another order than theirs": Reading(
        files(ABC, "two.csv", {"two.csv": "path,label,class a.png,dog,0 b.png,cat,1 c.png,eel,2"}),
        "a=dog b=cat c=eel | a=0 b=1 c=2", "have other labels", "cat dog eel|",
    ),
    "names, and numbers from 1, in a file of labels": Reading(
        files("in/a.png in/b.png in/c.png", "in --labels two.csv",
              {"two.csv": "path,class,target a.png,cat,1 b.png,dog,2 c.png,eel,3"}),
        "a=cat b=dog c=eel | a='1' b='2' c='3'", "is not known", "cat dog eel|0 1 2 3",
    ),
    "columns of 0 and 1": Reading(
        parquet(eel=[0, 1, 0], cat=[1, 0, 1], width=[7, 8, 9]), "a,c=cat b=eel | a b c",
        "--label-column eel,cat",
    ),
    "columns of true and false": Reading(
        parquet(eel=[False, True, False], cat=[False, False, True]), "a={} b={eel} c={cat} | a b c",
        "--label-column eel,cat",
    ),
    "columns of True and False, as pandas writes get_dummies": Reading(
        files(ABC, "list.csv",
              {"list.csv": "path,eel,cat a.png,True,False b.png,False,True c.png,False,True"}),
        "a=eel b,c=cat | a b c",
    ),
    "columns of signs": Reading(
        files(ABC, "list.csv", {"list.csv": SIGNS}), f"{SIGNED} | a b c",
        "2 columns of only -1 and 1: 'Smiling', 'Young'",
    ),
    "columns of signs and 0": Reading(
        files(f"{ABC} d.png", "list.csv --label-column Smiling,Young",
              {"list.csv": f"{SIGNS} d.png,0,1,1"}), f"{SIGNED} d={{Young}}",
        "such as '-1' are beside 0 and 1 in the columns 'Smiling', 'Young'. Choose: `--no-l",
    ),
    "columns of signs and 0 of two tables": Reading(
        files(f"{ABC} d.png", "'{list,more}.csv' --label-column Smiling,Young",
              {"list.csv": SIGNS, "more.csv": "image_id,Smiling,Young,x d.png,0,1,1"}),
        f"{SIGNED} d={{Young}}",
        "such as '-1' are beside 0 and 1 in the columns 'Smiling', 'Young'. Choose: `--no-l",
    ),
    **{f"labels of type {kind}": Reading(
        typed(kind, *values), "a b", "the column 'label' of a.parquet has values of type",
    ) for kind, values in (
        (pa.decimal128(5, 2), (1, 2)), (pa.timestamp("s"), (1, 2)), (pa.binary(), (b"cat", b"dog")),
        (pa.struct([("name", pa.string())]), ({"name": "cat"}, {"name": "dog"})),
    )},
    "columns that name other images": Reading(
        files(f"{ABC} d.png", "list.csv",
              {"list.csv": "path,file,label a.png,c.png,cat b.png,d.png,dog"}),
        "a=cat b=dog | c=cat d=dog",
    ),
    "two columns of keys": Reading(
        files("a.png b.png", "list.csv --key-column code --labels labels.csv",
              {"list.csv": "path,code a.png,7 b.png,8",
               "labels.csv": "key,other,label 7,8,cat 8,7,dog"}),
        "", "the columns 'key', 'other' of labels.csv name the samples",
    ),
    # splits of columns
    "splits of a file of labels, by a column": Reading(
        files(IN_ABC, "in --labels l.csv --label-column label",
              {"l.csv": "filename,label,split a.png,cat,train b.png,dog,val c.png,cat,train"}),
        "a,c=cat b=dog", f"column 'split' of l.csv {LOOK_LIKE_SPLITS}",
    ),
    **{f"splits of a table with a file of labels {flags or lines}": Reading(
        files("a.png b.png", f"in.csv --labels l.csv {flags}",
              {"in.csv": SPLIT_LINES, "l.csv": lines}), "a=eel b=ant",
        f"column 'split' of in.csv {LOOK_LIKE_SPLITS}",
    ) for lines, flags in (
        ("key,label a.png,eel b.png,ant", ""), ("a.png,eel b.png,ant", ""),
        ("key,kind,x a.png,eel,1 b.png,ant,1", "--label-column kind"),
    )},
    "a column of flags": Reading(
        files(ABC, "l.csv", {"l.csv": "path,label,Test a.png,cat,1 b.png,dog,0 c.png,cat,0"}),
        "a,c=cat b=dog", "he column 'Test' of|!which may be splits",
    ),
    "a part of the folders has no line": Reading(
        files("in/train/cat/a.png in/val/cat/b.png", "in --labels labels.csv",
              {"labels.csv": "key,label train/cat/a.png,eel"}),
        "a=eel | a=eel b | a=eel b", "1 of 2 samples have no line in labels.csv, and"
        "|look like splits",
    ),
    # numbers
    "labels of tar members": Reading(
        tar("a.png b.png", {"a": "01", "b": "10"}), "a='01' b='10' | a=1 b=10 | a=1.0 b=10.0",
    ),
    **{f"class numbers from 0 or 1 in {path}, {numbers}": Reading(
        files(IN_ABC, f"{source} --classes classes.txt", {"classes.txt": "ant bee cat",
              path: "path,label " + " ".join(f"{n}.png,{c}" for n, c in zip("abc", numbers))}),  # noqa: B905
        labels,
    ) for numbers, labels in (("112", "a,b=bee c=cat"), ("014", ""))
      for path, source in (("in/list.csv", "in/list.csv"), ("l.csv", "in --labels l.csv"))},
    "numbers of a class map that folders contradict": Reading(
        files("in/ant/0.png in/ant/1.png in/bee/2.png in/bee/3.png",
              "in --labels l.csv --classes in",
              {"l.csv": "path,label 0.png,1 1.png,1 2.png,0 3.png,0"}),
        "0,1=bee 2,3=ant",
    ),
}  # fmt: skip
"""A * in place of labels stands for any."""

BUILT: dict[str, Reading] = {
    "names, and their numbers": Reading(
        parquet(label=["dog", "cat", "eel"], target=[1, 0, 2]), "a=dog b=cat c=eel",
        "not used: 'target'", "cat dog eel",
    ),
    "numbers from 1, and the same numbers": Reading(
        parquet(label=[1, 3, 2], target=[1, 3, 2], category=[1.0, 3.0, 2.0]), "a=1 b=3 c=2",
        "not used: 'target', 'category'",
    ),
    "names whose categories have an order": Reading(
        parquet(label=pa.DictionaryArray.from_arrays([0, 2, 1], list("lmh"), ordered=True)),
        "a=l b=h c=m", "ordered: 'l', 'm', 'h'; classes are numbered by name", "h l m",
    ),
    # folders
    "images beside a folder that cannot be read": Reading(
        files("in/images/a.png", "in", {"in/odd/1.jxl": "x"}), "a", NO_CLASS.format("'images'"),
    ),
    "a validation set in a folder that is no class": Reading(
        files(f"{TRAIN} photos/val/images/v.png", "photos/val"), "v", NO_CLASS.format("'images'"),
    ),
    "images and lines of boxes": Reading(
        files("in/dataset/train/images/a.png in/dataset/train/images/b.png", "in",
              {"in/dataset/train/labels/a.txt": "0 0.5"}),
        "a b", NO_CLASS.format("'dataset', 'train', 'images'"),
    ),
    "a folder of JPEG files beside labels of MATLAB": Reading(
        files("in/jpg/a.png", "in --label-level 1", {"in/labels.mat": "x"}), "a=jpg", "!is a class",
    ),
    "a zip of a split": Reading(
        packed(files("in/train/a.png", "in"), "zip"), "a", NO_CLASS.format("'train'"),
    ),
    "a split with a file of labels": Reading(
        files("in/train/a.png", "in --labels l.csv", {"l.csv": "a,cat"}), "a=cat", "!is a class",
    ),
    "one folder that is a class": Reading(
        files("in/images/cat/a.png", "in"), "a=cat",
        "images/: each folder is a class: 'cat' (--label-level 0 for no label, 1 for the one class",
    ),
    **{f"a level without a folder, {flags}": Reading(
        files("in/x/cat/a.png in/y/b.png", f"in --label-level {flags}"), labels,
    ) for flags, labels in (("2", "a=cat b"), ("0", "a b"), ("1 --no-label y", "a=x b"))},
    "a validation set of the same classes": Reading(
        files(" ".join(IN_CLASSES.format(f"photos/{split}") for split in ("train", "val"))
              + " photos/dev/1/x.png photos/dev/2/y.png", "photos/val"), READ_ANIMALS, "!--classes",
    ),
    "a flat test set": Reading(files(f"{TRAIN} photos/test/x.png", "photos/test"), "x"),
    "names in upper and lower case that are listed": Reading(
        files("in/cat/0.png in/Cat/1.png", "in --classes classes.txt", {"classes.txt": "cat Cat"}),
        "0=cat 1=Cat",
    ),
    "names of images": Reading(
        files("in/cat.1.png in/dog.1.png", "in"), "1", "2 samples without labels (--labels) in in",
    ),
    "names of images of an archive": Reading(
        packed(files("in/cat.1.png in/dog.1.png", "in"), "zip"), "1",
        "2 samples without labels (--labels) in in.zip",
    ),
    "a few images that are called as others": Reading(
        files(" ".join(f"in/a/{n}.png" for n in range(6)) + " in/a/1_mask.png in/b/gas_mask.png",
              "in"), "0,1,2,3,4,5,1_mask=a gas_mask=b", "1 of 8 images of in are called as others",
    ),
    "a few images that are called as others, by their whole names": Reading(
        files(" ".join(f"in/a/{n}.png" for n in range(6)) + " in/a/1_mask.png in/b/gas_mask.png",
              "in --sample-name whole"), "0,1,2,3,4,5,1_mask=a gas_mask=b", "!called as others",
    ),
    "a label beside an image in a tar of folders": Reading(
        packed(files(IN_CLASSES.format("in"), "in", {"in/cat/a1.cls": "fox"}), "tar"),
        "a1=fox a2 b1 b2", "3 samples of tar archives have no .cls member, as others have, and get",
    ),
    # columns
    "a column of labels by its name": Reading(
        files(ABC, "one.csv", {"one.csv":
              "path,fine_label,kind,num_classes a.png,1,x,3 b.png,0,x,3 c.png,2,y,4"}),
        "a=1 b=0 c=2", "labels from 'fine_label'",
    ),
    "a class that no row has": Reading(
        lambda root: parquet(eel=[0, 0], cat=[1, 0], dog=[0, 1])(root)
        + " --label-column eel,cat,dog", "a=cat b=dog",
        "Labels from columns of 0 and 1, a class each: rows have one class", "eel cat dog",
    ),
    "columns of signs": Reading(
        files(ABC, "list.csv --label-column Smiling,Young", {"list.csv": SIGNS}), SIGNED,
        "In the columns 'Smiling', 'Young', -1 counts as 0",
    ),
    "columns that name the same image": Reading(
        files("a.png b.png", "list.csv",
              {"list.csv": "path,file,label ROOT/a.png,a.png,cat b.png,b.png,dog"}), "a=cat b=dog",
    ),
    "a column of keys of the source and of the file": Reading(
        files("a.png b.png", "list.csv --key-column code --labels labels.csv",
              {"list.csv": "path,code a.png,7 b.png,8",
               "labels.csv": "code,other,label 7,8,cat 8,7,dog"}), "7=cat 8=dog",
    ),
    "keys of the source in a file without others": Reading(
        files("a.png b.png", "list.csv --key-column code --labels labels.csv",
              {"list.csv": "path,code a.png,7 b.png,8", "labels.csv": "key,label 7,cat 8,dog"}),
        "7=cat 8=dog",
    ),
    "a path that begins with a point": Reading(
        files("a.png b.png", "list.csv", {"list.csv": "path,label ./a.png,x b.png,y a.png,x"}),
        "a=x b=y",
    ),
    "a table of a validation set": Reading(
        files("a.png b.png", "val.csv", {"val.csv": "path,label a.png,cat b.png,dog"}),
        "a=cat b=dog", f"The 2 classes are {NUMBERED}",
    ),
    "a table of a validation set, with classes": Reading(
        files("a.png b.png", "val.csv --classes c.txt",
              {"val.csv": "path,label a.png,cat b.png,dog", "c.txt": "cat dog"}),
        "a=cat b=dog", f"!{NUMBERED}",
    ),
    "labels of a validation set": Reading(
        files("photos/train/cat/c.png photos/val/x/d.png", "photos/val --labels val_labels.csv",
              {"val_labels.csv": "x/d.png,eel"}), "d=eel", f"The 1 classes are {NUMBERED}",
    ),
    "numbers of a class map in the order of the folders": Reading(
        files("in/ant/0.png in/ant/1.png in/bee/2.png in/bee/3.png",
              "in --labels l.csv --classes c.txt",
              {"l.csv": "path,label 0.png,1 1.png,1 2.png,0 3.png,0", "c.txt": "bee ant"}),
        "0,1=ant 2,3=bee",
    ),
    # splits
    "splits of a file of labels": Reading(
        files(IN_ABC, "in --labels l.csv --all-splits",
              {"l.csv": "filename,label,split a.png,cat,train b.png,dog,val c.png,cat,train"}),
        "a,c=cat b=dog", "Rows of several splits are taken together: the column 'split'",
    ),
    "a column that may be of splits": Reading(
        files(ABC, "l.csv", {"l.csv": "path,label,fold a.png,cat,1 b.png,dog,2 c.png,cat,2"}),
        "a,c=cat b=dog", "he column 'fold' of|which may be splits",
    ),
    "a column of other numbers": Reading(
        files(ABC, "l.csv", {"l.csv": "path,label,valid a.png,cat,3 b.png,dog,4 c.png,cat,4"}),
        "a,c=cat b=dog", "!he column 'valid' of|!which may be splits",
    ),
    "classes that look like splits": Reading(
        files("a.png", "list.csv --key-column id", {"list.csv": "path,id,label " + " ".join(
            f"a.png,train_{n},{'train' if n % 2 else 'car'}" for n in range(30))}),
        " ".join(f"train_{n}={'train' if n % 2 else 'car'}" for n in range(30)),
    ),
    "runs that look like splits": Reading(
        files("a.png", "list.csv --key-column id",
              {"list.csv": "path,id,label,run a.png,1,cat,test1 a.png,2,dog,test2"}),
        "1=cat 2=dog",
    ),
    "folders of splits with labels of a file": Reading(
        files("in/train/a.png in/val/b.png", "in --labels labels.csv",
              {"labels.csv": "train/a.png,cat val/b.png,dog"}), "a=cat b=dog", TAKEN,
    ),
    "folders of splits with labels of a table": Reading(
        files("in/train/a.png in/val/b.png", "in/list.csv",
              {"in/list.csv": "path,label train/a.png,cat val/b.png,dog"}), "a=cat b=dog", TAKEN,
    ),
    "folders of splits with labels of members": Reading(
        tar("train/a.png val/b.png", {"train/a": "3", "val/b": "3"}), "a,b=3", TAKEN,
    ),
    "a folder of one split": Reading(
        files("in/train/a.png in/val/b.png", "in/train"), "a", "!several splits",
    ),
}  # fmt: skip

WRONG: dict[str, tuple[Case, str]] = {
    "a table of another machine": (
        files("in/photos/a.png", "in/list.csv", {"in/list.csv": "path,label /x/photos/a.png,cat"}),
        "such as /x/photos/a.png: write their folder into the table, or if its rows label the",
    ),
    **{f"a table of {column} beside the folders of its files": (
        files("train/a.png train/b.png test/a.png test/b.png", "train.csv",
              {"train.csv": f"{column},label a.png,cat b.png,dog"}),
        "build that folder with --labels",
    ) for column in ("id", "path")},
    "a list without names of columns": (
        files(IN_ABC, "l.lst --source-kind manifest",
              {"l.lst": "in/a.png,cat in/b.png,dog in/c.png,cat"}),
        "Write a line above it that names the columns, such as uri,label",
    ),
    "a table with a level": (
        files("a.png b.png", "list.csv --label-level 2",
              {"list.csv": "path,label a.png,cat b.png,dog"}),
        "labels that are not its folders; leave out --label-level",
    ),
    "a dataset with a level": (
        lambda root: "python:os:getcwd --label-level 1", "has no folders; leave out --label-level",
    ),
    "a bit that is none": (
        files("a.png", "list.csv --label-column x,y", {"list.csv": "path,x,y a.png,0,2"}),
        "list.csv: has '2' in the column 'y'; of several columns of labels, each has 0 or 1",
    ),
    "two labels of one path": (
        files("a.png b.png", "list.csv", {"list.csv": "path,label ./a.png,x b.png,y a.png,y"}),
        "2 samples a.png with the labels x and y",
    ),
    "a column of keys of the source alone": (
        files("in/a.png", "in --key-column code --labels labels.csv",
              {"labels.csv": "key,label 7,cat 8,dog"}), "labels.csv has no column 'code'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_each_command_of_a_refusal_gives_its_labels(builds: Builds, name: str) -> None:
    reading = REFUSED[name]
    choices = builds.choices(reading.case(builds.root))
    for labels, expected in itertools.zip_longest(choices, reading.expected()):
        assert labels == expected or (labels and expected == {"*": None}), choices
    reading.require_said(builds)
    reading.require_classes(*(builds.root / f"choice0{n}.store" for n in range(len(choices))))


@pytest.mark.parametrize("name", BUILT)
def test_what_is_read_in_one_way_builds(
    builds: Builds, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reading = BUILT[name]
    assert [builds.labels(reading.case(builds.root))] == reading.expected()
    builds.printed += caplog.text
    reading.require_said(builds)
    reading.require_classes(builds.root / "1.store")


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_refused_without_a_command(builds: Builds, name: str) -> None:
    case, said = WRONG[name]
    assert builds.refused(case(builds.root)) == []
    assert said in " ".join(builds.printed.split())


# --- folders and archives -----------------------------------------------------------------------


PACKED = pytest.mark.parametrize("kind", ["", "zip", "tar"])


def packed_as(root: Path, kind: str) -> str:
    """The folder ``in``, packed; names in a tar archive begin with ``./``."""
    return pack(root, kind, "./")


LEFT_OUT = (
    ".ipynb_checkpoints", "cat/.ipynb_checkpoints", "@eaDir", "dog/@eaDir/x", "__MACOSX/cat",
    ".Trash-1000/files", "$RECYCLE.BIN", "#recycle/cat", "System Volume Information", "found.000",
    "cat/_gsdata_", "Network Trash Folder", "Temporary Items",
)  # fmt: skip


@PACKED
def test_hidden_images_and_those_of_service_folders_are_left_out_and_counted(
    builds: Builds, kind: str
) -> None:
    put_classes(builds.root / "in")
    hidden = builds.root / "in/cat/.trashed-1699-x1.png"
    put(hidden.parent, hidden.name, "._x1.png")
    put(builds.root / "in", ".x2.png")
    put(builds.root / "in", *(f"{folder}/{name}.png" for folder in LEFT_OUT for name in "xy"))
    assert builds.labels(packed_as(builds.root, kind)) == ANIMALS
    count = f"{2 * len(LEFT_OUT)} images in hidden"
    [line] = [line for line in builds.printed.splitlines() if count in line]
    assert any(f"{folder}/{name}.png" in line for folder in LEFT_OUT for name in "xy")
    assert "name such a folder as the source" in line
    [line] = [line for line in builds.printed.splitlines() if "2 hidden images" in line]
    assert "to read them, rename them without the dot" in line
    for folder in LEFT_OUT[::3] if not kind else ():  # the advice
        assert builds.labels(f"'in/{folder}'") == {"x": None, "y": None}
    hidden.rename(hidden.with_name("x1.png"))
    assert builds.labels(packed_as(builds.root, kind)) == {**ANIMALS, "x1": "cat"}
    shutil.rmtree(builds.root / "in")
    put(builds.root / "in/.cache", "x1.png")
    assert builds.refused(packed_as(builds.root, kind)) == []
    assert "has no image" in builds.printed
    assert "1 images in hidden folders" in builds.printed


@pytest.mark.parametrize(
    "names",
    [
        "bounding_box_train bounding_box_test query", "DIV2K_train_HR DIV2K_valid_HR",
        "ILSVRC2012_img_train ILSVRC2012_img_val", "cars_train cars_test", "my_train my_val",
        "ISIC2018_Task3_Training_Input ISIC2018_Task3_Test_Input", "query gallery",
        "images_training_rev1 images_test_rev1", "fruits-360_Training fruits-360_Test",
        "query support", "tiny-imagenet-train tiny-imagenet-val", "unsup pos neg",
    ],
)  # fmt: skip
def test_names_that_differ_in_the_word_of_a_split_are_splits(names: str) -> None:
    keys = Texts(sorted(f"{name}/{name}.png" for name in names.split()))
    [doubt] = read_folders(keys, LabelRules(), "in", "in/{}".format).doubts
    assert "like a class" in doubt.text or "like classes" in doubt.text
    assert "query" in names or re.search("--no-label|tr", " ".join(doubt.ways[0]).lower())


def test_splits_within_splits_of_their_names_are_said_once() -> None:
    names = [f"seg_{split}/seg_{split}/{n}.jpg" for split in ("train", "test") for n in "ab"]
    assert len(notes_of_folders(names)) == 1


@pytest.mark.parametrize(
    "names", ["test_a test_b", "latest fastest", "train car", "re_test retest", "trail tram"]
)
def test_names_that_share_the_word_of_a_split_or_have_it_in_others_are_none(names: str) -> None:
    assert not differing_in(names.split(), ("train", "test", "tr"))


def test_masks_in_a_folder_beside_photos_are_no_samples_of_a_table(builds: Builds) -> None:
    places = {"images/": "masks/", "train/img/": "train/gt/", "": "masks/"}
    for number, (photos, masks) in enumerate(places.items()):
        root = builds.root / f"d{number}"
        put(root, *(f"{photos}{n}.png" for n in "abc"), *(f"{masks}{n}_mask.png" for n in "abc"))
        uris = [f"{photos}{n}.png" for n in "abc"] + [f"{masks}{n}_mask.png" for n in "abc"]
        for root_of in ("", f"{root}/"):
            put_csv(root / "list.csv", "path", *(f"{root_of}{uri}" for uri in uris))
            if photos:
                assert builds.choices(f"d{number}/list.csv")[0] == dict.fromkeys("abc")
        put_csv(root / "list.csv", "path,label", *(f"{uri},cat" for uri in uris))
        assert builds.choices(f"d{number}/list.csv") == []
        assert "3 of 6 images" in builds.printed
        assert "with the labels by --labels" in builds.printed
        put_csv(root / "list.csv", "path,label", *(f"{uri},cat" for uri in uris[:3]))
        assert builds.labels(f"d{number}/list.csv") == dict.fromkeys("abc", "cat")
    assert builds.choices("d0 --label-level 0")[0] == dict.fromkeys("abc")


def test_archives_with_the_same_names_have_the_classes_of_one(builds: Builds) -> None:
    names = [f"{top}/{number}.png" for top in ("cat", "dog") for number in range(3)]
    for number in range(2):
        members = [(name, photo(f"{number}{name}")) for name in names]
        write_tar(write(builds.root / f"in/{number}.tar", b""), members)
    builds.labels("'in/*.tar'")
    version = precache.open(builds.root / "1.store")
    assert (version.classes, version.rows) == (("cat", "dog"), 12)
    assert "each folder is a class: 'cat', 'dog' (--label-level 0" in builds.printed


@pytest.mark.parametrize("top", ["", "data/"])
def test_parts_of_an_archive_are_sources_once_it_is_unpacked(builds: Builds, top: str) -> None:
    archives = {
        "parts": ("images/a.png images/b.png masks/a.png masks/b.png", "{images,masks}", "ab"),
        "splits": ("train/cat/a.png train/dog/b.png val/cat/c.png", "train", "ab"),
    }
    for name, (names, source, keys) in archives.items():
        for number in range(2):
            put(builds.root / "in", *(top + each for each in names.split()))
            (builds.root / packed_as(builds.root, "zip")).rename(
                write(builds.root / f"{name}/{number}.zip", b"")
            )
            assert builds.choices(f"{name} --source-kind zip")[:1] != [dict.fromkeys("abc")]
            assert f"unpack it, and give 'FOLDER/{top}{source}' as the source" in builds.printed
        shutil.move(builds.root / "in", builds.root / f"unpacked_{name}")
        assert builds.labels(f"'unpacked_{name}/{top}{source}'").keys() == {*keys}


def test_braces_in_names_of_folders_are_no_pattern(builds: Builds) -> None:
    put(builds.root / "d{x}", *(f"{of}/{n}.png" for of in ("im{a}ges", "masks") for n in "ab"))
    assert builds.choices("'d{x}'") == [dict.fromkeys("ab")] * 2
    put(builds.root / "e{x}", *(f"{of}/{n}.png" for of in ("images", "masks") for n in "ab"))
    assert builds.labels("'e{x}/{images,masks}'") == dict.fromkeys("ab")
    put(builds.root / "f{x}", *(f"{n}{end}.png" for n in "ab" for end in ("", "_mask")))
    assert builds.choices("'f{x}'") == [dict.fromkeys("ab")]
    for name, letter in (("train-0", "a"), ("val-0", "b")):
        path = write(builds.root / f"g{{x}}/{name}.tar", b"")
        write_tar(path, [(f"{letter}.png", photo(letter))])
    assert builds.choices("'g{x}/*.tar'") == [{"a": None}, {"b": None}, dict.fromkeys("ab")]


@pytest.mark.parametrize(
    ("files", "is_refused", "said", "top"),
    [
        (["b/"], True, "no image can be read in 'b'", ""),
        (["b/x/"], True, "no image can be read in 'b'", "data/"),
        (["b/1.jxl", "d/2.ppm"], True, "no image can be read in 'b', 'd'", ""),
        (["b/notes.txt", "b/1.jp2"], True, "no image can be read in 'b'", "data/"),
        (["b/.DS_Store", "b/._1.png"], True, "no image can be read in 'b'", ""),
        (["b/.hidden.png"], True, "no image can be read in 'b'", "data/"),
        (["b/notes.txt", "b/x/1.xml"], False, "Folders without an image are no classes: 'b'", ""),
        ([".git/", "@eaDir/1.jxl"], False, "", "data/"),
    ],
)
def test_a_folder_without_a_readable_image_is_a_class_or_not_as_the_user_says(
    builds: Builds, files: list[str], is_refused: bool, said: str, top: str
) -> None:
    put(builds.root / "in", f"{top}a/1.png", f"{top}c/2.png")
    for name in files:
        path = builds.root / "in" / top / name
        path.mkdir(parents=True) if name.endswith("/") else write(path, b"x")
    labels = {"1": "a", "2": "c"}
    if is_refused:
        assert builds.choices("in") == [labels, labels]
        classes = [precache.open(builds.root / f"choice0{n}.store").classes for n in range(2)]
        bare = {name[0] for name in files}
        assert classes == [tuple(sorted({"a", "c"} | bare)), ("a", "c")]
    else:
        assert builds.labels("in") == labels
    assert said in builds.printed
    assert ("no image can be read" in builds.printed) == is_refused


@pytest.mark.parametrize(("kind", "top"), [("zip", ""), ("tar", "data/")])
def test_a_folder_of_an_archive_without_a_readable_image_is_as_that_of_a_disk(
    builds: Builds, kind: str, top: str
) -> None:
    put(builds.root / "in", f"{top}a/1.png", f"{top}c/2.png", f"{top}b/3.png", f"{top}d/4.png")
    for name, data in (("b/3.jxl", b"x"), ("d/4.txt", b"x")):
        path = builds.root / "in" / top / name
        path.with_suffix(".png").unlink()
        write(path, data)
    labels = {"1": "a", "2": "c"}
    assert builds.choices(packed_as(builds.root, kind)) == [labels]
    assert "no image can be read in 'b'," in builds.printed
    assert "list the names of all classes in a text file" in builds.printed
    write(builds.root / "classes.txt", b"a\nb\nc\n")  # the advice
    assert builds.labels(packed_as(builds.root, kind), "--classes", "classes.txt") == labels
    assert precache.open(builds.root / "2.store").classes == ("a", "b", "c")
    (builds.root / "in" / top / "b/3.jxl").unlink()
    assert builds.labels(packed_as(builds.root, kind)) == labels
    assert "Folders without an image are no classes: 'd'" in builds.printed


@pytest.mark.parametrize(
    ("name", "data", "said", "flags"),
    [
        ("labels.csv", b"key,label\na.png,cat\n", "by --labels, or as", "--labels in/labels.csv"),
        ("m.csv", b"file_name,label,x\na.png,cat,1\n", "or as the source itself", ""),
        ("m.jsonl", b'{"file_name": "a.png", "label": "cat"}', "as the source itself", ""),
        ("m.parquet", b"", "itself, with --source-kind manifest", "--source-kind manifest"),
    ],
)
def test_a_table_in_a_folder_of_images_is_named_with_the_way_to_read_it(
    builds: Builds, name: str, data: bytes, said: str, flags: str
) -> None:
    put(builds.root / "in", "a.png")
    write(builds.root / "in" / name, data)
    if not data:
        pq.write_table(
            pa.table({"file_name": ["a.png"], "label": ["cat"]}), builds.root / "in" / name
        )
    builds.labels("in")
    assert f"{name} in the source gives labels only " in builds.printed
    assert said in builds.printed
    source = "in" if "--labels" in flags else f"in/{name}"
    assert builds.labels(source, *flags.split()) == {"a": "cat"}
    assert "gives labels only" not in builds.printed


def test_a_folder_of_tars_and_tables_names_the_tars(builds: Builds) -> None:
    pq.write_table(pa.table({"url": ["http://x"]}), write(builds.root / "in/0.parquet", b""))
    write_tar(builds.root / "in/0.tar", [("a.png", photo("a"))])
    with pytest.raises(SourceError, match=r"0\.tar is a tar archive: give '.*/in/\*\*/\*\.tar'"):
        precache.build("in", "a.store", address="serial")


# --- columns of tables --------------------------------------------------------------------------

NAMES = [*"abcdefgh"]


@pytest.mark.parametrize(
    ("values", "in_tar", "in_lmdb"),
    [
        ([struct.pack("<h", n) for n in range(3)], r"s0.png is '\x00\x00'", ""),
        ([struct.pack("<h", n) for n in (7, 200)], r"s0.png is '\x07\x00'", "s1.cls is not UTF-8"),
        ([bytes([n]) for n in range(3)], r"s0.png is '\x00'", ""),
        ([b"0", b"1", struct.pack("<h", 300)], r"s2.png is ',\x01'", ""),
        ([pickle.dumps(1)], r"a.tar/s0 (b'\x80\x04K\x01.')", "s0.cls is not UTF-8"),
    ],
)
def test_labels_in_binary_are_refused_by_the_first_value(
    builds: Builds, values: list[bytes], in_tar: str, in_lmdb: str
) -> None:
    members = []
    for number, value in enumerate(values):
        members += [(f"s{number}.png", photo(str(number))), (f"s{number}.cls", value)]
    write_tar(builds.root / "a.tar", members)
    lmdb_of(builds.root, members)
    for source, said in (("a.tar", in_tar), ("a.lmdb", in_lmdb or in_tar)):
        assert builds.refused(source) == []
        assert said in " ".join(builds.printed.split())


def in_parquet(root: Path, columns: dict[str, Any]) -> str:
    pq.write_table(pa.table(columns), root / "a.parquet")
    return "a.parquet --key-column id"


def in_arrow(root: Path, columns: dict[str, Any]) -> str:
    images = [{"bytes": data, "path": None} for data in columns["image"]]
    with quiet_datasets():
        data = datasets.Dataset.from_dict({**columns, "image": images})
        data.save_to_disk(root / "saved")
    return "saved --key-column id"


def of_files(root: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Write the images as files; returns a table of their paths and the labels."""
    put(root, *(f"{name}.png" for name in columns["id"]))
    others = {name: values for name, values in columns.items() if name not in ("id", "image")}
    return {"path": [f"{name}.png" for name in columns["id"]], **others}


def in_manifest(root: Path, columns: dict[str, Any]) -> str:
    pq.write_table(pa.table(of_files(root, columns) | {"id": columns["id"]}), root / "uris.parquet")
    return "uris.parquet --source-kind manifest --key-column id"


def in_lines(root: Path, columns: dict[str, Any]) -> str:
    table = of_files(root, columns)
    rows = (",".join(map(str, row)) for row in zip(*table.values(), strict=True))
    put_csv(root / "list.csv", ",".join(table), *rows)
    return "list.csv"


def in_json_lines(root: Path, columns: dict[str, Any]) -> str:
    table = of_files(root, columns)
    rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
    put_csv(root / "list.jsonl", *map(json.dumps, rows))
    return "list.jsonl"


Write = Callable[[Path, dict[str, Any]], str]


TABLE_KINDS = (in_parquet, in_arrow, in_manifest, in_lines, in_json_lines)


def columns_of(**labels: list[Any]) -> dict[str, Any]:
    names = NAMES[: len(next(iter(labels.values())))]
    return {"id": names, "image": [photo(name) for name in names], **labels}


def test_columns_of_0_and_1_are_refused_once_no_other_table_is_beside_theirs(
    builds: Builds,
) -> None:
    (builds.root / "in").mkdir()
    in_parquet(builds.root / "in", columns_of(eel=[0, 1, 1], cat=[1, 1, 0]))
    other = builds.root / "in/other.parquet"
    pq.write_table(pa.table(columns_of(width=[7, 8, 9])), other)
    build = ("build", "in/*.parquet", "in.store", "--address", "serial")
    assert builds.run(*build) == 0, builds.printed
    other.unlink()
    assert builds.run(*build) == 2
    assert "--label-column eel,cat" in builds.printed


def test_columns_that_may_have_the_images_or_declared_classes_are_refused(builds: Builds) -> None:
    columns = columns_of(label=["x", "y"])
    images = [photo(name) for name in ("q", "r")]
    source = in_parquet(builds.root, columns | {"jpg": images})
    assert builds.choices(source) == [{"a": "x", "b": "y"}] * 2
    feature = datasets.ClassLabel(names=["u", "v", "w"])
    data = {"id": NAMES[:3], "img": [{"bytes": photo(n), "path": None} for n in NAMES[:3]]}
    with quiet_datasets():
        features = {name: datasets.Value("string") for name in ("id",)} | {
            "img": datasets.Image(), "fine": feature, "coarse": feature,
        }  # fmt: skip
        rows = datasets.Dataset.from_dict(
            {**data, "fine": [0, 1, 2], "coarse": [0, 1, 1]}, datasets.Features(features)
        )
        rows.to_parquet(str(builds.root / "a.parquet"))
    assert builds.choices("a.parquet --key-column id") == [
        {"a": "u", "b": "v", "c": "w"},
        {"a": "u", "b": "v", "c": "v"},
    ]


@pytest.mark.parametrize("table", TABLE_KINDS)
def test_columns_are_read_alike_in_every_table(builds: Builds, table: Write) -> None:
    def laid(**labels: list[Any]) -> str:
        shutil.rmtree(builds.root / "saved", ignore_errors=True)
        return table(builds.root, columns_of(**labels))

    lists, names = builds.choices(laid(label=["a|b", "a", "b"]))
    assert lists == {"a": {"a", "b"}, "b": {"a"}, "c": {"b"}}
    assert names == {"a": "a|b", "b": "a", "c": "b"}
    assert builds.labels(laid(label=[0.5, 2.0], size=[7, 9])) == {"a": 0.5, "b": 2.0}
    assert "not used: 'size'" in builds.printed
    several, none = builds.choices(laid(eel=[0.0, 1.0, 1.0], cat=[1.0, 1.0, 0.0], width=[7, 8, 9]))
    assert several == {"a": {"cat"}, "b": {"cat", "eel"}, "c": {"eel"}}
    assert none == dict.fromkeys("abc")
    labels = {"label": ["cat", "dog", "cat"], "class": ["a", "b", "c"]}  # which disagree
    expected = [dict(zip(NAMES, values, strict=False)) for values in labels.values()]
    assert builds.choices(laid(**labels)) == expected
    alike = {"label": [0, 1, 0], "class": ["cat", "dog", "cat"], "other": [7, 8, 9]}
    assert builds.labels(laid(**alike)) == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize(
    ("table", "labels"),
    [*((table, {"label": ["cat", "dog", "cat", "eel"]}) for table in TABLE_KINDS), (in_lines, {})],
)
def test_a_table_of_rows_of_several_splits_is_refused(
    builds: Builds, table: Write, labels: dict[str, list[Any]]
) -> None:
    splits = ["train", "test", "", "train"]
    columns = columns_of(split=splits, part=["train", "0", "1", "2"], **labels)
    source = table(builds.root, columns)
    names = columns["id"]
    expected = dict(zip(names, labels.get("label", [None] * 4), strict=True))
    assert builds.choices(source) == [expected]  # the first way
    printed = " ".join(builds.printed.split())
    assert "'split' of" in printed
    assert "has 'test', 'train', which look like splits, and the samples of all are" in printed
    builds.labels(source, "--all-splits")
    assert "Rows of several splits are taken together: the column 'split'" in builds.printed
    shutil.rmtree(builds.root / "saved", ignore_errors=True)
    rows = [row for row in range(4) if splits[row] == "train"]  # the second way
    of_one = {name: [values[row] for row in rows] for name, values in columns.items()}
    taken = builds.labels(table(builds.root, of_one))
    assert taken == {names[row]: expected[names[row]] for row in rows}
    assert "several splits" not in builds.printed


def test_rows_of_several_splits_are_seen_across_files(builds: Builds) -> None:
    for split in ("train", "test"):
        columns = columns_of(label=["cat"], split=[split])
        pq.write_table(pa.table(columns | {"id": [split]}), builds.root / f"{split[1:]}.parquet")
    source = "'*.parquet' --key-column id"
    assert builds.choices(source) == [{"train": "cat", "test": "cat"}]
    assert builds.labels("rain.parquet --key-column id") == {"train": "cat"}


def put_files(root: Path, files: dict[str, str]) -> None:
    """Write containers with a sample for each letter; in tables its label is 7."""
    for name, letters in files.items():
        path = write(root / name, b"")
        if name.endswith(".parquet"):
            images = {"image": [*map(photo, letters)], "id": [*letters]}
            pq.write_table(pa.table({**images, "label": [7] * len(letters)}), path)
        elif name.endswith(".tar"):
            write_tar(path, [(f"{n}.png", photo(n)) for n in letters])
        else:
            put(path.parent, *(f"{letter}.png" for letter in letters))
            put_csv(path, "path,label", *(f"{letter}.png,7" for letter in letters))


HUB = {
    "train-00000-of-00002.parquet": "ab",
    "train-00001-of-00002.parquet": "c",
    "validation-00000-of-00001.parquet": "d",
}
HIVE = {"split=test/0.parquet": "d", "split=train/0.parquet": "ab", "split=train/1.parquet": "c"}
FOLDERS = {"train/0.tar": "ab", "train/1.tar": "c", "val/0.tar": "d"}
NAMED = {"x-train-000.tar": "ab", "x-train-001.tar": "c", "x-val-000.tar": "d", "y.tar": "e"}
NESTED = {"train/a/0.tar": "ab", "train/1.tar": "c", "val/a/0.tar": "d"}
LISTS = {"train.csv": "abc", "val.csv": "d"}
FOLDS = {"fold=0/0.parquet": "abc", "fold=1/0.parquet": "d"}
FLAGS = {"is_valid=0/0.parquet": "abc", "is_valid=1/0.parquet": "d"}

FILES: list[tuple[str, dict[str, str], str]] = [
    ("'in/*.parquet' --key-column id", HUB, "abc d abcd"),
    ("'in/{t,v}*.parquet' --key-column id", HUB, "abc d abcd"),
    ("in --source-kind parquet --key-column id", HUB, "abc d abcd"),
    ("'in/**/*.parquet' --key-column id", HIVE, "abc d abcd"),
    ("'in/fold=*/0.parquet' --key-column id", FOLDS, "abc d abcd"),
    ("'in/is_valid=*/0.parquet' --key-column id", FLAGS, "abc d abcd"),
    ("'in/*/*.tar'", FOLDERS, "abc d abcd"),
    ("'in/*/{0..1}.tar'", {**FOLDERS, "val/1.tar": "e"}, "abc de abcde"),
    ("'in/*.tar'", NAMED, "abc d abcde"),
    ("'in/**/*.tar'", NESTED, "abc d abcd"),
    ("'in/*.csv'", LISTS, "abc d abcd"),
    ("in --source-kind manifest", LISTS, "abc d abcd"),
    ("'in/train-*.parquet' --key-column id", HUB, "abc"),
    ("'in/split=train/*.parquet' --key-column id", HIVE, "abc"),
    ("in/train --source-kind tar", FOLDERS, "abc"),
    ("'in/**/*.tar'", {"train/0.tar": "a", "extra/0.tar": "b"}, "ab"),
    ("'in/*.tar'", {"test1.tar": "a", "test2.tar": "b"}, "ab"),
    ("'in/*.tar'", {"train.tar": "a", "bus.tar": "b"}, "ab"),
    ("'in/*.tar'", {"latest-0.tar": "a", "training-1.tar": "b"}, "ab"),
    ("'in/*/*.parquet' --key-column id", {"use=train/0.parquet": "a", "use=x/0.parquet": "b"},
     "ab"),
]  # fmt: skip
"""Sources, files, and the samples of the build, or those of each command where splits are several.
"""


@pytest.mark.parametrize(("source", "files", "expected"), FILES)
def test_files_of_several_splits_are_refused_with_the_command_for_each(
    builds: Builds, source: str, files: dict[str, str], expected: str
) -> None:
    put_files(builds.root / "in", files)
    if " " not in expected:
        assert "".join(sorted(builds.labels(source))) == expected
        assert "split" not in builds.printed.replace("split=train", "")
        return
    assert " ".join("".join(sorted(choice)) for choice in builds.choices(source)) == expected
    if files in (HIVE, NAMED, LISTS):
        *_, whole = commands_in(builds.printed)
        assert builds.run(*(word.replace("refused.", "all.") for word in whole)) == 0
        assert "Files of several splits are taken together: '" in builds.printed


def test_a_saved_dataset_of_several_splits_is_refused(builds: Builds) -> None:
    splits = {}
    for split, name in (("train", "a"), ("test", "b")):
        images = [{"bytes": photo(name), "path": f"{name}.png"}]
        splits[split] = datasets.Dataset.from_dict({"image": images, "label": ["cat"]})
    with quiet_datasets():
        datasets.DatasetDict(splits).save_to_disk(builds.root / "saved")
    assert builds.choices("saved") == [{"a": "cat"}, {"b": "cat"}, {"a": "cat", "b": "cat"}]
    assert "precache build saved/train refused.store" in builds.printed


def test_splits_of_files_and_of_a_column_are_settled_together(builds: Builds) -> None:
    for split, letters in (("train", "abc"), ("test", "d")):
        columns = columns_of(label=["cat"] * len(letters), split=[split] * len(letters))
        columns |= {"id": [*letters], "image": [*map(photo, letters)]}
        pq.write_table(pa.table(columns), write(builds.root / f"in/{split}-0.parquet", b""))
    source = "'in/*.parquet' --key-column id"
    of_each = [dict.fromkeys(keys, "cat") for keys in ("abc", "d", "abcd")]
    assert builds.choices(source) == of_each
    assert builds.choices(f"{source} --label-column label") == of_each
    assert builds.labels(f"{source} --all-splits") == dict.fromkeys("abcd", "cat")
    assert builds.labels("in/test-0.parquet --key-column id") == {"d": "cat"}


def test_columns_of_labels_are_compared_over_all_files(builds: Builds) -> None:
    build = ("build", "in/*.parquet", "in.store", "--key-column", "id", "--address", "serial")
    for name, label in (("a", "cat"), ("b", "dog")):
        columns = columns_of(label=[label], **{"class": ["x"]}) | {"id": [name]}
        pq.write_table(pa.table(columns), write(builds.root / f"in/{name}.parquet", b""))
        # The store keeps an index of the first file.
        assert builds.run(*build) == (0 if name == "a" else 2), builds.printed
    choices = builds.choices("'in/*.parquet' --key-column id")
    assert choices == [{"a": "cat", "b": "dog"}, {"a": "x", "b": "x"}]


# --- names of classes ---------------------------------------------------------------------------


@PACKED
def test_numbers_are_sorted_as_text_which_is_said_once(builds: Builds, kind: str) -> None:
    put(builds.root / "in", *(f"{number}/p{number}.png" for number in range(12)))
    builds.labels(packed_as(builds.root, kind))
    assert builds.printed.count("--class-order number") == 1
    assert "'10' comes before '2'" in builds.printed.replace("'11' comes", "'10' comes")
    assert precache.open(builds.root / "1.store").classes[:4] == ("0", "1", "10", "11")
    builds.labels(packed_as(builds.root, kind), "--class-order", "number")
    assert "sorted as text" not in builds.printed
    assert precache.open(builds.root / "2.store").classes == tuple(map(str, range(12)))
    write(builds.root / "classes.txt", "".join(f"{number}\n" for number in range(12)).encode())
    lines = (f"{number}/p{number}.png,{'xy'[number % 2]}" for number in range(12))
    put_csv(builds.root / "labels.csv", "key,label", *lines)
    for option, file in (("--classes", "classes.txt"), ("--labels", "labels.csv")):
        builds.labels(packed_as(builds.root, kind), option, file)
        assert "sorted as text" not in builds.printed


@pytest.mark.parametrize(
    ("before", "after", "said", "kept"),
    [
        ("bc", "abc", "'b' 0 -> 1, 'c' 1 -> 2;", "bca"),
        ("abc", "bc", "'b' 1 -> 0, 'c' 2 -> 1;", "abc"),
        ("abc", "bcd", "'b' 1 -> 0, 'c' 2 -> 1;", "abcd"),
        ("ab", "abc", "", ""),
        ("ab", "ab", "", ""),
    ],
)
def test_a_rebuild_that_renumbers_classes_says_so_with_the_flag_that_keeps_them(
    builds: Builds, before: str, after: str, said: str, kept: str
) -> None:
    for name in before:
        put(builds.root / "in" / name, f"{name}.png")
    build = ("build", "in", "in.store", "--address", "serial")
    assert builds.run(*build) == 0
    assert "other numbers" not in builds.printed
    for name in {*before} - {*after}:
        shutil.rmtree(builds.root / "in" / name)
    for name in {*after} - {*before}:
        put(builds.root / "in" / name, f"{name}.png")
    for command in (("plan", *build[1:], "--no-timing"), build):
        assert builds.run(*command) == 0
        printed = " ".join(builds.printed.split())
        assert ("Classes get other numbers than in version" in printed) == bool(said)
        assert said in printed
    assert precache.open("in.store").classes == tuple(after)
    if said:  # the advice, also after that build
        [flags] = re.findall(r"--classes in\.store@[0-9a-f]+", printed)
        assert builds.run(*build, *flags.split()) == 0
        version = precache.open("in.store")
        assert version.classes == tuple(kept)
        for key, label, is_valid in zip(version.keys, version.labels, version.valid, strict=True):
            assert key[0] == kept[label] if is_valid else key[0] not in after


@pytest.mark.parametrize("source", ["in/list.csv", "in --labels in/list.csv"])
def test_class_numbers_from_1_are_said_with_the_flags_that_count_from_0(
    builds: Builds, source: str
) -> None:
    put(builds.root / "in", "a.png", "b.png", "c.png")
    put_csv(builds.root / "in/list.csv", "path,label", "a.png,1", "b.png,3", "c.png,2")
    builds.labels(source)
    said = "Class numbers are from 1 to 3, and no sample has 0: a model needs 4 outputs; "
    assert f"{said}--label-kind name --class-order number" in builds.printed
    builds.labels(source, "--label-kind", "name", "--class-order", "number")
    assert precache.open(builds.root / "2.store").labels.max() == 2
    assert "Class numbers" not in builds.printed
    put_csv(builds.root / "in/list.csv", "path,label", "a.png,1", "b.png,0", "c.png,")
    builds.labels(source)
    assert "Class numbers" not in builds.printed


@pytest.mark.parametrize(
    ("name", "text", "classes"),
    [
        ("c.json", '{"cat": 1, "ant": 0, "dog": 2}', "ant cat dog"),
        ("c.json", '{"1": "cat", "0": "dog", "2": "ant"}', "dog cat ant"),
        ("c.json", '{"cat": 1, "dog": 2}', ""),
        ("c.json", '{"names": ["cat", "dog"]}', ""),
        ("c.yaml", "names:\n  0: cat\n  1: dog", ""),
        ("c.csv", "name,number\ncat,0\ndog,1", ""),
    ],
)
def test_files_of_classes_are_read_by_number_or_refused_with_the_way(
    builds: Builds, name: str, text: str, classes: str
) -> None:
    put(builds.root / "in", "cat/a.png", "dog/b.png")
    write(builds.root / name, text.encode())
    build = ("build", "in", "in.store", "--address", "serial", "--classes")
    if classes:
        assert builds.run(*build, name) == 0
        assert precache.open(builds.root / "in.store").classes == tuple(classes.split())
        return
    assert builds.run(*build, name) == 2
    printed = " ".join(builds.printed.split())
    assert "give a text file with the names of the classes one a line" in printed
    write(builds.root / "c.txt", b"cat\ndog\n")  # the advice
    assert builds.run(*build, "c.txt") == 0


def test_classes_that_a_build_no_longer_gives_are_said(builds: Builds) -> None:
    put(builds.root / "in", "a.png", "b.png")
    put_csv(builds.root / "labels.csv", "key,label", "a.png,ant", "b.png,bee")
    flags = ["build", "in", "store", "--address", "serial"]
    assert builds.run(*flags, "--labels", "labels.csv") == 0
    assert builds.run(*flags) == 0
    assert "Samples have no classes, and those of version" in builds.printed
    assert "have 2: to keep them, give the options for labels" in builds.printed


# --- commands and buckets -----------------------------------------------------------------------


def test_a_plan_refuses_as_a_build_does_and_no_command_shows_a_secret(builds: Builds) -> None:
    put(builds.root / "in", "train/a.png", "val/b.png")
    assert builds.run("plan", "in", "a.store") == 2
    assert "  precache plan in/train a.store\n" in builds.printed
    assert "  precache plan in a.store --label-level 1\n" in builds.printed
    assert builds.run("plan", "in", "a.store", "--storage-options", "secret=hush") == 2
    assert "hush" not in builds.printed


def test_a_choice_in_python_names_its_ways(tmp_path: Path) -> None:
    put(tmp_path / "in", "train/a.png", "val/b.png")
    with pytest.raises(ChoiceError) as caught:
        precache.build(tmp_path / "in", tmp_path / "a.store", address="serial")
    assert caught.value.ways == (
        (str(tmp_path / "in/train"),),
        ("--label-level", "1"),
        ("--label-level", "0"),
    )
    assert json.dumps(caught.value.ways)


def test_folders_of_a_bucket_are_read_alike(tmp_path: Path, s3: S3Server) -> None:
    folder = open_folder("s3://bucket/readings", s3.options())
    for name in ("train/cat/a", "train/dog/b", "val/cat/c", "train/.ipynb_checkpoints/d"):
        folder.put(f"{name}.png", [photo(name)])
    options: dict[str, Any] = {"address": "serial", "storage_options": s3.options()}
    with pytest.raises(ChoiceError) as caught:
        precache.build("s3://bucket/readings", tmp_path / "a.store", **options)
    [train] = caught.value.ways[0]
    assert train == "s3://bucket/readings/train"
    result = precache.build(train, tmp_path / "a.store", **options)
    assert result.left_out == {"service_folder": 1}
    assert built_labels(tmp_path / "a.store") == {"a": "cat", "b": "dog"}


def test_an_archive_of_a_bucket_is_to_be_unpacked(builds: Builds, s3: S3Server) -> None:
    put(builds.root / "in", "images/a.png", "images/b.png", "masks/a.png", "masks/b.png")
    packed_as(builds.root, "zip")
    url = "s3://bucket/packed/in.zip"
    open_folder("s3://bucket", s3.options()).put("packed/in.zip", [Path("in.zip").read_bytes()])
    with pytest.raises(ChoiceError) as caught:
        precache.build(url, "a.store", address="serial", storage_options=s3.options())
    assert "unpack it, and give 'FOLDER/{images,masks}' as the source" in str(caught.value)
    assert caught.value.ways == ()


def test_a_refusal_of_a_bucket_prints_commands_without_secrets(
    builds: Builds, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = s3.options()
    folder = open_folder("s3://bucket/refused", options)
    for name in ("train/cat/a", "train/dog/b", "val/cat/c"):
        folder.put(f"{name}.png", [photo(name)])
    flags = ["--storage-options", f"endpoint_url={options['endpoint_url']}"]
    for name in ("key", "secret"):
        monkeypatch.setenv(f"REFUSED_{name}", options[name])
        flags += ["--storage-options-env", f"{name}=REFUSED_{name}"]
    choices = builds.choices("s3://bucket/refused", *flags)
    assert choices[0] == {"a": "cat", "b": "dog"}
    assert len(choices) == 4


# --- images that pair ---------------------------------------------------------------------------

PAIRS: dict[str, tuple[list[str], list[str]]] = {
    "of another suffix": (["{0}.png", "{0}.jpg"], ["{*.jpg,*.png}"]),
    "of a mask": (["{0}.png", "{0}_gt.png"], ["{*.*,*_gt.*}"]),
    "of both": (["{0}_sat.png", "{0}_mask.png"], ["{*_sat.*,*_mask.*}"]),
    "of a letter": (["x_{0}.png", "x_{0}_L.png"], ["{*.*,*_L.*}"]),
    "of class folders": (
        ["{1}/{1} ({0}).png", "{1}/{1} ({0})_mask.png"],
        ["**/{*.*,*_mask.*}"],
    ),
    "of several masks": (
        ["u_{0}_leftImg8bit.png", "u_{0}_gtFine_color.png", "u_{0}_gtFine_labelIds.png"],
        ["{*_leftImg8bit.*,*_gtFine_color.*}", "{*_leftImg8bit.*,*_gtFine_labelIds.*}"],
    ),
}  # fmt: skip
"""Endings -> the names of a sample's images, and the sources that pair them."""


def as_table(root: Path) -> str:
    names = [path.relative_to(root).as_posix() for path in sorted((root / "in").rglob("*.*"))]
    put_csv(root / "list.csv", "path", *names)
    return "list.csv"


@pytest.mark.parametrize("name", PAIRS)
def test_images_that_pair_by_name_are_no_samples_of_their_own(builds: Builds, name: str) -> None:
    names, sources = PAIRS[name]
    numbers = range(1, 7)
    for number in numbers:
        put(builds.root / "in", *(each.format(number, "ab"[number % 2]) for each in names))
    choices = builds.choices("in")
    commands = commands_in(builds.printed)
    assert [source for _, source, *_ in commands if source != "in"] == [
        f"in/{of}" for of in sources
    ]
    for choice in choices[: len(sources)]:
        assert len(choice) == len(numbers)
    assert builds.run("plan", "in", "plan.store") == 2
    for kind in ("", "zip", "tar", "table"):
        is_table = kind == "table"
        source = as_table(builds.root) if is_table else packed_as(builds.root, kind)
        if kind == "tar" and name == "of another suffix":  # as WebDataset names inputs
            assert len(builds.labels(source)) == len(numbers)
            continue
        if kind:
            offered = [[build, source, *rest] for build, of, *rest in commands if of == "in"]
            assert builds.refused(source) == offered
        if kind and not is_table:
            assert f"the files in a folder, and 'FOLDER/{sources[0]}'" in builds.printed
        whole = (f"{source}.store", "--sample-name", "whole", "--address", "serial")
        assert builds.run("build", source, *whole) == 0
        assert len(precache.open(whole[0]).keys) == len(names) * len(numbers)


def test_a_recipe_that_reads_columns_is_offered_the_sources_that_have_them(builds: Builds) -> None:
    put(builds.root / "data", *(f"{part}/{n}.png" for part in ("images", "masks") for n in "ab"))
    for column in ("masks", "mask"):
        fields = [
            f'[fields.{name}]\ninput = "{of}"\nops = [{{ op = "decode" }}]\n'
            for name, of in (("image", "images"), ("mask", column))
        ]
        write(builds.root / "recipe.toml", "".join(fields).encode())
        choices = builds.choices("data --recipe recipe.toml")
        sources = [command[1] for command in commands_in(builds.printed)]
        assert sources == (["data/{images,masks}"] if column == "masks" else [])
        assert len(choices) == len(sources)
        said = "with a recipe that reads its columns ('images', 'masks') in place of"
        assert (said in builds.printed) == (column == "mask")
    put(builds.root / "splits", "train/cat/a.png", "train/dog/b.png", "val/cat/c.png")
    assert builds.choices("splits --recipe recipe.toml") == []
    assert "reads the bytes of images in place of 'images', 'mask'" in builds.printed
