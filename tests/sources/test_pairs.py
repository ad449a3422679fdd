"""What names of files and folders say: classes, parts of samples, copies, and the ways out.

A case is a tree of names, and what its listing comes to: the labels of its samples in the order of
their keys, ``-`` for none; where it has columns, the files of each sample; or the ways out of a
refusal, with what each comes to.
"""

import shlex
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import ChoiceError
from precache.storage.open import open_folder
from precache.store.columns import Texts
from precache_workers.planning.listing import list_rows
from precache_workers.planning.request import Request, source_of
from precache_workers.sources.pairs import partners_across, partners_among
from tests.support.building import write

RECIPE = precache.Recipe.image(resize=16)


def request_of(arguments: str) -> Request:
    source, *flags = shlex.split(arguments)
    options: dict[str, object] = {
        name[2:].replace("-", "_"): int(value) if value.isdigit() else value
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    if "no_label" in options:
        options["no_label"] = (options["no_label"],)
    return Request(source=source, store="x.store", recipe=RECIPE, **options)


def outcome(arguments: str) -> tuple[str | dict[str, str], str]:
    """List a source as a build does; returns the outcome, and the lines or the refusal.

    A way out that is refused takes the ways out of that, of several ways each the first, as the
    command line does.
    """
    request = request_of(arguments)
    opened, store = source_of(request), open_folder("x.store", None)
    try:
        listed = list_rows(request, store, opened, lambda count: None, lambda line: None)
    except ChoiceError as error:
        lines, ways = commands(arguments, error), dict[str, str]()
        for line in lines:
            found, _ = outcome(line)
            inner = [*found.items()] if isinstance(found, dict) else [(line, found)]
            ways |= dict(inner[: 1 if len(lines) > 1 else None])
        return ways, str(error)
    table, said = listed.spec.table, "\n".join(listed.notes)
    order = table.keys.order()
    if table.locations is not None:
        places = [table.locations.places.to_pylist()[row] for row in order]
        named = (part["name"].rpartition(".")[0] for place in places for part in place.values())
        names = [*named]
        width = len(places[0])
        return " ".join(
            "+".join(names[at : at + width]) for at in range(0, len(names), width)
        ), said
    labels = [table.classes[label] if label >= 0 else "-" for label in table.labels[order]]
    return " ".join(labels), said


def commands(arguments: str, error: ChoiceError) -> list[str]:
    """The ways out of a refusal, with the arguments that were refused."""
    here, before = f"{Path.cwd()}/", shlex.split(arguments)
    ways = [[word.removeprefix(here) for word in way] for way in error.ways]
    return [
        shlex.join(way if way[0][0] != "-" else [*before, *way])
        for way in ways
        if way[0] not in before[1:]
    ]


def lay(names: str) -> None:
    for name in names.split(";") if ";" in names else names.split():
        write(Path("in", name if "." in name else f"{name}.png"), b"")


CASES = r"""
train/cat/a train/dog/b valid/cat/c
> in/train: cat dog
> in --label-level 2: cat dog cat
> in --label-level 1: train train valid
> in --label-level 0: - - -

train2017/a val2017/b
> in/train2017: -
> in --label-level 1: train2017 val2017
> in --label-level 0: - -

trainA/a testA/b
> in/trainA: -
> in --label-level 1: testA trainA
> in --label-level 0: - -

seg_train/seg_train/sea/a seg_test/seg_test/ice/b seg_pred/seg_pred/c
> in/seg_train: seg_train
> in --label-level 3: - ice sea
> in --label-level 1: seg_pred seg_test seg_train
> in --label-level 0: - - -

data/train_set/cat/a data/test_set/dog/b
> in/data/train_set: cat
> in --label-level 3: dog cat
> in --label-level 2: test_set train_set
> in --label-level 0: - -

cat/a dog/b test/c
> in/test: -
> in --label-level 1: cat dog test
> in --label-level 0: - - -

train/cat/a train/dog/b extra/cat/c
> in/train: cat dog
> in --label-level 2: cat cat dog
> in --label-level 1: extra train train
> in --label-level 0: - - -

neg/a pos/b unlabeled/c
> in --label-level 1 --no-label unlabeled: neg pos -
> in --label-level 1: neg pos unlabeled
> in --label-level 0: - - -

images/a masks/a
> in/images: -
> 'in/{images,masks}': a+a
? 'images', 'masks' look like parts of one data set, not like classes. Choose

JPEGImages/a JPEGImages/b SegmentationClass/b
> in/JPEGImages: - -
> 'in/{JPEGImages,SegmentationClass}': b+b

fold0/cat/a fold0/dog/b fold1/cat/c fold1/dog/d
> in --label-level 2: cat dog cat dog
> in --label-level 1: fold0 fold0 fold1 fold1
> in --label-level 0: - - - -

HR/0001 HR/0002 LR/0001 LR/0002
> 'in/{HR,LR}': 0001+0001 0002+0002
> in --label-level 1: HR HR LR LR
> in --label-level 0: - - - -

x/lena x/owl y/lena y/owl z/lena z/owl
> 'in/{x,y,z}': lena+lena+lena owl+owl+owl
> in --label-level 1: x x y y z z
> in --label-level 0: - - - - - -

x/lena x/owl y/lena_cut y/owl_cut
> 'in/{x,y}': lena+lena_cut owl+owl_cut
> in --label-level 1: x x y y
> in --label-level 0: - - - -
? look like parts of one data set, not like classes: their files have the same names ('lena',
  'owl')

HR/0001 HR/0002 HR/0003 LR_bicubic/X4/0001x4 LR_bicubic/X4/0002x4 LR_bicubic/X4/0003x4
> 'in/{HR,LR_bicubic/X4}': 0001+0001x4 0002+0002x4 0003+0003x4
> in --label-level 1: HR HR HR LR_bicubic LR_bicubic LR_bicubic
> in --label-level 0: - - - - - -

amazon/images/bike/a amazon/images/mug/b dslr/images/bike/c dslr/images/mug/d
> in --label-level 3: bike mug bike mug
> in --label-level 1: amazon amazon dslr dslr
> in --label-level 0: - - - -

train/good/a test/good/b test/bad/a test/bad/b ground_truth/bad/a_mask ground_truth/bad/b_mask
> in/train: good

cup/train/good/a cup/test/bad/b cup/ground_truth/bad/c nut/train/good/d nut/test/bad/e
nut/ground_truth/bad/f
> in --label-level 3: bad bad good bad bad good
> in --label-level 1: cup cup cup nut nut nut
> in --label-level 0: - - - - - -

photos/a photos/cat/b photos/dog/c
> in --label-level 2: - cat dog
> in --label-level 1: photos photos photos

rgb/0 rgb/1 depth/0 depth/1 flow/0 flow/1 normal/0 normal/1 semantic/0 semantic/1
> in/rgb: - -
> 'in/{rgb,depth,flow,normal,semantic}': 0+0+0+0+0 1+1+1+1+1
> in --label-level 1: depth depth flow flow normal normal rgb rgb semantic semantic
> in --label-level 0: - - - - - - - - - -

images/a images/b masks/c masks/d
> in/images: - -

jpg/0 jpg/1 annotations/trimaps/0_ids annotations/trimaps/1_ids
> in/jpg: - -
> 'in/{jpg,annotations/trimaps}': 0+0_ids 1+1_ids

train/x/images/a train/x/images/b train/x/masks/a1 train/x/masks/a2 train/x/masks/b1
train/y/images/a train/y/images/b train/y/masks/a1 train/y/masks/a2 train/y/masks/b1
test/z/images/c
> 'in/train/{x,y}/images': a+a b+b

train/img/a train/gt/a val/img/a val/gt/a
> in/train/img: -
> 'in/train/{img,gt}': a+a

gt/a gt/b sharp/a sharp/b
> in/sharp: - -
> 'in/{sharp,gt}': a+a b+b

labeled/cat/a labeled/dog/b unlabeled/c
> in/labeled: cat dog
> in --label-level 2: cat dog -
> in --label-level 1: labeled labeled unlabeled
> in --label-level 0: - - -

our485/low/a our485/high/a our485/low/b our485/high/b eval15/low/c eval15/high/c
> 'in/our485/{high,low}': a+a b+b
> in --label-level 2: high low high high low low
> in --label-level 1: eval15 eval15 our485 our485 our485 our485
> in --label-level 0: - - - - - -

left8/train/ulm/u0_left8 left8/train/jena/j0_left8 left8/val/bonn/b0_left8
gtFine/train/ulm/u0_gtFine gtFine/train/jena/j0_gtFine gtFine/val/bonn/b0_gtFine
> in/left8/train: jena ulm
> 'in/{left8,gtFine}/train': jena/j0_left8+jena/j0_gtFine ulm/u0_left8+ulm/u0_gtFine
> in --label-level 3: jena ulm bonn jena ulm bonn
> in --label-level 1: gtFine gtFine gtFine left8 left8 left8
> in --label-level 0: - - - - - -

leftImg8bit/u/u0_leftImg8bit leftImg8bit/u/u1_leftImg8bit gtFine/u/u0_gtFine_color
gtFine/u/u0_gtFine_ids gtFine/u/u1_gtFine_color gtFine/u/u1_gtFine_ids
> in/leftImg8bit: u u
> 'in/{leftImg8bit/**/*_leftImg8bit.*,gtFine/**/*_gtFine_color.*}':
  u/u0_leftImg8bit+u/u0_gtFine_color u/u1_leftImg8bit+u/u1_gtFine_color
> 'in/{leftImg8bit/**/*_leftImg8bit.*,gtFine/**/*_gtFine_ids.*}': u/u0_leftImg8bit+u/u0_gtFine_ids
  u/u1_leftImg8bit+u/u1_gtFine_ids

cat/img_1 cat/img_2 dog/img_1 dog/img_2
= cat cat dog dog
? each folder is a class: 'cat', 'dog' (--label-level 0 for no label)

ann/glad ann/sad bob/glad bob/sad cyd/glad cyd/sad dan/glad dan/sad eve/glad eve/sad
= ann ann bob bob cyd cyd dan dan eve eve

images/x/a images/y/b
= x y
? images/: each folder is a class: 'x', 'y' (--label-level 0 for no label, 1 for the one class
  'images')

photos/a photos/b
= - -
? no folder is a class: 'photos' (--label-level 1 for one class)

cat/a cat/b
= cat cat
? each folder is a class: 'cat' (--label-level 0 for no label)

train/x/a train/y/b
= x y
? train/: each folder is a class: 'x', 'y' (--label-level 0 for no label, 1 for the one class
  'train')

a/b/x/p a/b/y/q
= x y
? a/b/: each folder is a class: 'x', 'y' (--label-level 0 for no label, 1 for the one class 'a')

car/a train/b bus/c
= bus car train
? each folder is a class: 'train', 'bus', 'car' (--label-level 0 for no label)

valid/a invalid/b mask/c no_mask/d part_1/e part_2/f
= invalid mask no_mask part_1 part_2 valid

n01/images/a n02/images/b
= n01 n02
? each folder is a class: 'n01', 'n02' (--label-level 0 for no label)

a/images/x/p b/images/y/q
= a b
? each folder is a class: 'a', 'b' (--label-level 0 for no label, 3 for the folders in them, such
  as a/images/x)

pet/cat/a tree/oak/b
= pet tree
? each folder is a class: 'pet', 'tree' (--label-level 0 for no label, 2 for the folders in them,
  such as pet/cat)

images/1.jpg images/2.jpg masks/1 masks/2|--label-level 0
> 'in/{images,masks}': 1+1 2+2

cat/a cat/b cat/c cat_new/a cat_new/b cat_new/c old/a old/b old/c cat_aug/x1 cat_aug/x2 crop_1/y1
crop_1/y2
= cat cat cat cat_aug cat_aug cat_new cat_new cat_new crop_1 crop_1 old old old

cat/a1 dog/a2 dog/d2 cat/b1 cat_aug/a1_flip_1 cat_aug/b1
> in --sample-name whole: cat cat cat_aug cat_aug dog dog
? but for their folder (cat_aug), such as cat_aug/a1_flip_1

cat/a1 dog/a2 dog/d2 cat/b1 aug-dog/a2 aug-dog/d2
> in --sample-name whole: aug-dog aug-dog cat cat dog dog

cat/a1 dog/a2 dog/d1 dog/d2 cat/b1 thumbs/d1 thumbs/d2 thumbs/a2_small
> in --sample-name whole: cat cat dog dog dog thumbs thumbs thumbs

0/a 0/b 0/thumbs/a 0/thumbs/b
> 'in/0/{*.*,thumbs/*.*}': a+a b+b

cat/0 cat/1 dog/2 dog/3 cat/thumbs/0 cat/thumbs/1 dog/thumbs/2 dog/thumbs/3
> in --sample-name whole: cat cat cat cat dog dog dog dog
? move one kind of these images elsewhere

cat/a cat/b dog/c dog/d thumbs/cat/a thumbs/cat/b thumbs/dog/c thumbs/dog/d
> in --sample-name whole: cat cat dog dog thumbs thumbs thumbs thumbs

0 1 2 3 4 5 6 7 8 resized/3|--label-level 0
= - - - - - - - - - -

a a@2x b c d
= - - - - -
? 1 of 5 images of in are called as others (*.*) but for their ending (*@2x.*), such as a@2x.png,
  and are samples

a a@2x b b@2x c
> 'in/{*.*,*@2x.*}': a+a@2x b+b@2x
> in --sample-name whole: - - - - -

a a_small b b_small
> 'in/{*.*,*_small.*}': a+a_small b+b_small
> in --sample-name whole: - - - -

a;a (1);b
= - - -
? 1 of 3 images of in are called as others (*.*) but for their ending (* (1).*), such as a
  (1).png, and are samples

image_1 image_2 mask_1 mask_2
> 'in/{image_*.*,mask_*.*}': image_1+mask_1 image_2+mask_2

img_1 img_2 gt_img_1 gt_img_2
> 'in/{*.*,gt_*.*}': img_1+gt_img_1 img_2+gt_img_2

cat/a cat/b cat/thumb_a cat/thumb_b
> 'in/**/{*.*,thumb_*.*}': cat/a+cat/thumb_a cat/b+cat/thumb_b

cat/a;cat/Copy of a;dog/b
= cat cat dog
? 1 of 3 images of in are called as others (*.*) but for their beginning (Copy of *.*), such as

no/1 no/mask_2 yes/2 yes/mask_1
= no no yes yes

a;a copy;b;b copy
> 'in/{*.*,* copy.*}': a+a copy b+b copy
> in --sample-name whole: - - - -

a (1);a (2);b (1)
= - - -
? nothing

1_left 1_right 2_left 2_right
= - - - -
? 2 of 4 images of in are called as others (*_left.*) but for their ending (*_right.*), such as
  1_right.png, and are samples

1_left 1_right 2_left 3_right 4_up
= - - - - -
? nothing

cat_1 cat_2 dog_1 dog_2
= - - - -
? nothing

small a_smallest a
= - - -
? nothing

1 10x10 1x1
= - - -
? nothing

1.png 1.jpg 2.png 2.jpg
> 'in/{*.jpg,*.png}': 1+1 2+2

1.jpg 1.png 2.jpg 3.jpg 4.jpg 5.jpg 6.jpg 7.jpg
= - - - - - - - -

a.jpg a.png b.jpg b.png c.jpg d.jpg e.jpg f.png g.png h.png
? move one kind of these images elsewhere

1_sat 1_mask 2_sat 2_mask
> 'in/{*_sat.*,*_mask.*}': 1_sat+1_mask 2_sat+2_mask

0 0_a_b_c 1 1_a_b_c 2 2_a_b_c 3 3_a_b_c
> 'in/{*.*,*_a_b_c.*}': 0+0_a_b_c 1+1_a_b_c 2+2_a_b_c 3+3_a_b_c
> in --sample-name whole: - - - - - - - -

a/a;a/a_mask;b/b;b/b_mask
> 'in/**/{*.*,*_mask.*}': a/a+a/a_mask b/b+b/b_mask

u_1_leftImg8bit u_1_gtFine_color u_1_gtFine_labelIds u_2_leftImg8bit u_2_gtFine_color
u_2_gtFine_labelIds
> 'in/{*_leftImg8bit.*,*_gtFine_color.*}': u_1_leftImg8bit+u_1_gtFine_color
  u_2_leftImg8bit+u_2_gtFine_color
> 'in/{*_leftImg8bit.*,*_gtFine_labelIds.*}': u_1_leftImg8bit+u_1_gtFine_labelIds
  u_2_leftImg8bit+u_2_gtFine_labelIds

a/x;a/x (2);b/y;b/y (2)
> 'in/**/{*.*,* (2).*}': a/x+a/x (2) b/y+b/y (2)
> in --sample-name whole: a a b b

a/x;a/x (1);a/x (2);a/x (3);a/x (4);a/x (5);a/x (6);a/x (7);a/x (8);a/x (9);a/x (10);a/x (11)
= a a a a a a a a a a a a
? 2 of 12 images of in are called as others (*.*) but for their ending (* (1).*, * (2).*)

a/x a/aug_0_x b/y b/aug_0_y
> in --sample-name whole: a a b b

a/0 a/1 a/2 a/3 a/4 a/5 a/1_mask b/gas_mask
= a a a a a a a b
? 1 of 8 images of in are called as others (*.*) but for their ending (*_mask.*), such as
  a/1_mask.png, and are samples
"""
"""Names below a folder, with flags behind a bar; ``=``, what they come to, or ``>``, the ways out;
and ``?``, what is said. Lines that are indented go on."""


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"))
def test_a_tree_of_names_is_read_in_the_one_way_or_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = case.replace("\n  ", " ").splitlines()
    parts = {mark: [line[2:] for line in lines if line[0] == mark] for mark in "=>?"}
    names, _, flags = " ".join(line for line in lines if line[0] not in parts).partition("|")
    lay(names)
    found, said = outcome(f"in {flags}")
    if isinstance(found, dict):
        found = [f"{way}: {result}" for way, result in found.items()]
    assert found == (parts["="][0] if parts["="] else parts[">"])
    for text in parts["?"]:
        assert text in said if text != "nothing" else not said


def test_many_names_are_read_by_columns() -> None:
    numbers = np.arange(50_000)
    apart = Texts([f"{of}/{n % 1000}/{n}.png" for of in ("images", "masks") for n in numbers])
    beside = Texts([f"{n % 1000}/{n}{end}.png" for n in numbers for end in ("", "_mask")])
    for read, names in ((partners_across, apart), (partners_among, beside)):
        found = read(names)
        assert found is not None
        assert found.count == len(numbers)
