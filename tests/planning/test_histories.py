"""Any history of a store: sources, recipes, functions and labels are edited, builds end, fail or
are killed, objects are damaged, versions collected or made current again.

The current version is always whole, and equal to a build into an empty store. Of that, rows,
labels, classes, holes and statistics are computed here as well, without precache. A build takes
over all rows that a search through all versions finds, and as many as its plan says.

``python -m tests.planning.test_histories SEED STEPS`` runs one history, and leaves out steps while
it fails; with several numbers, the steps of these numbers alone.
PRECACHE_OTHER_TREE=FOLDER has another checkout make the builds into empty stores: rows, holes and
statistics are then those of its code.
"""

import functools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import BuildError, DamageError, PrecacheError, StorageError, StoreError
from tests.support import fresh_build
from tests.support.building import ask, build_here, build_until, collect_until, end, start
from tests.support.changing_sources import BROKEN, CLASSES, SOURCES, Dataset, Folder, Sample, Source
from tests.support.fresh_build import content
from tests.support.random_recipes import FUNCTIONS, FailedSampleError, Row, draw_recipe, row_of

CHANGES = 90
"""About as many as a build makes in its store."""
OTHER_TREE = os.environ.get("PRECACHE_OTHER_TREE")
DOCUMENTED = (BuildError, DamageError, StorageError, StoreError)
"""What may be raised on a store that was damaged."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Held:
    """What a version holds: rows by rules, of a source's samples by key, of which some failed."""

    source: Source
    rules: list[list[Any]]
    samples: dict[str, Sample]
    failed: set[str]

    def serves(self, rule: list[Any], key: str, sample: Sample) -> bool:
        """Whether there are rows of the sample from which the rule goes on."""
        if key not in self.samples or key in self.failed:
            return False
        same = self.samples[key].number == sample.number
        return same and any(own == rule[: len(own)] for own in self.rules)


# --- a history ----------------------------------------------------------------------------------


class History:
    """A store, the sources and recipes that it was built from, and what it must hold."""

    def __init__(self, seed: int, root: Path) -> None:
        self.root, self.seed = root, seed
        self.draw = random.Random(seed)
        (root / "code").mkdir(parents=True)
        self.store = root / "store"
        self.serial = self.release = 0
        self.sources: list[Source] = []
        self.functions: dict[str, int] = {"bits": 1, "unlucky": 16, "scale": 1}
        self.recipe = draw_recipe(self.draw, 0)
        self.options: dict[str, Any] = {}
        self.right: dict[str, Content] = {}
        self.fresh: dict[str, Content] = {}
        self.held: dict[str, Held] = {}
        self.unsure: set[str] = set()
        self.said: list[str] = []
        self._write_functions()
        self.source = self._new_source(Folder)
        for kind in self.draw.sample(SOURCES, 2):
            self._new_source(kind)

    def _new_source(self, kind: type[Source]) -> Source:
        source = kind(self.root / f"{kind.__name__.lower()}{len(self.sources)}", self.draw)
        self.sources.append(source)
        for _ in range(self.draw.choice([5, 9, 14])):
            self._add(source)
        source.finish()
        return source

    def _add(self, source: Source) -> None:
        self.serial += 1
        label = self.draw.choice(CLASSES[:3])
        source.put(source.name_of(self.serial, label), self.draw.randrange(40), label)

    def _write_functions(self) -> None:
        self.code = FUNCTIONS.format(**self.functions)
        (self.root / "code" / "history_functions.py").write_text(self.code)

    # --- edits ------------------------------------------------------------------------------

    def edit(self) -> str:
        edits = [self.edit_samples] * 6 + [self.edit_recipe] * 3
        edits += [self.edit_function, self.edit_labels, self.switch, self.switch, self.nothing]
        return self.draw.choice(edits)()

    def nothing(self) -> str:
        return "nothing"

    def switch(self) -> str:
        """Build from another source, or from a copy of this one."""
        if type(self.source) is Folder and self.draw.random() < 0.3:
            copy = Folder(self.root / f"copy{len(self.sources)}", self.draw)
            shutil.copytree(self.source.root, copy.root, dirs_exist_ok=True)
            copy.samples = dict(self.source.samples)
            self.sources.append(copy)
            self.source = copy
            return "copy the source"
        self.source = self.draw.choice(self.sources)
        return f"build from {self.source.root.name}"

    def edit_recipe(self) -> str:
        if self.draw.random() < 0.3:  # another codec alone
            self.recipe = json.loads(json.dumps(self.recipe))
            self.recipe["fields"]["image"]["codec"] = self.draw.choice(["image", "zstd", "raw"])
            return "another codec"
        self.recipe = draw_recipe(self.draw, self.release)
        return "another recipe"

    def edit_function(self) -> str:
        self.release += 1
        name, values = self.draw.choice(
            [("bits", [1, 2, 4, 8]), ("unlucky", [16, 3, 5, 9]), ("scale", [1, 2])]
        )
        self.functions[name] = self.draw.choice(values)
        self._write_functions()
        for field in self.recipe["fields"].values():
            for op in field["ops"]:
                if "version" in op:
                    op["version"] = str(self.release)
        return f"function with {name} {self.functions[name]}"

    def edit_labels(self) -> str:
        """Labels of a file, class numbers of a file, no labels, or none of these."""
        self.options = {}
        kind = self.draw.choice(["labels", "labels", "classes", "plain"])
        if kind in ("labels", "classes"):
            self.options[kind] = str(
                self.root / {"labels": "labels.csv", "classes": "classes.txt"}[kind]
            )
        self.lines = {serial: self.draw.choice(CLASSES) for serial in range(0, 400, 3)}
        self.order = self.draw.sample([*CLASSES, "gnu"], 5)
        return f"labels: {kind}"

    def edit_samples(self) -> str:
        source, draw = self.source, self.draw
        names = list(source.samples)
        some = draw.sample(names, min(len(names), draw.choice([1, 1, 3])))
        kind = draw.choice(
            ["add", "remove", "return", "change", "rewrite", "spoil", "fix", "touch", "touch all",
             "repeat", "relabel", "move class"]
        )  # fmt: skip
        if kind == "add":
            for _ in range(draw.choice([1, 4, 9])):
                self._add(source)
        elif kind == "remove" and len(names) > 6:
            self.gone = [(source, name, source.samples[name]) for name in some]
            for name in some:
                source.remove(name)
        elif kind == "return":
            for home, name, sample in getattr(self, "gone", []):
                if home is source and name not in source.samples:
                    label = sample.label
                    label = CLASSES[label] if isinstance(label, int) else label
                    source.put(name, sample.number, str(label))
        elif kind in ("change", "repeat", "spoil", "rewrite", "fix"):
            if kind == "fix":
                some = [name for name in names if source.samples[name].number == BROKEN]
            for name in some:
                number = BROKEN if kind == "spoil" else draw.randrange(40)
                if kind == "repeat":
                    number = source.samples[draw.choice(names)].number
                left = sum(sample.number != BROKEN for sample in source.samples.values())
                if number == BROKEN and left < 5:
                    continue
                if draw.random() < 0.5 or kind == "rewrite":
                    source.rewrite(name, number)
                else:
                    source.put(name, number, self._class_of(name))
        elif kind in ("touch", "touch all"):
            for name in names if kind == "touch all" else some:
                source.touch(name)
        elif kind == "relabel":
            for name in some:
                source.put(name, source.samples[name].number, draw.choice(CLASSES))
        elif kind == "move class":
            label, other = draw.sample(CLASSES, 2)
            for name in [name for name in names if name.startswith(f"{label}/")]:
                moved = name.replace(label, other, 1)
                number = source.samples[name].number
                source.remove(name)
                source.put(moved, number, other)
        source.finish()
        return kind

    def _class_of(self, name: str) -> str:
        label = self.source.samples[name].label
        return CLASSES[label] if isinstance(label, int) else str(label)

    # --- what is asked for ------------------------------------------------------------------

    def request(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Recipe, options that decide what a version holds, and labels by key, as they are now."""
        fields = {
            name: {"input": "image", **field} if self.source.extra else field
            for name, field in self.recipe["fields"].items()
            if name != "extra" or self.source.extra
        }
        labels = {key: sample.label for key, sample in self.source.expected().items()}
        options = {} if not self.source.named else dict(self.options)
        if "labels" in options:
            lines = {
                key: self.lines[serial]
                for key in labels
                if (serial := int(re.sub(r"\D", "", key.rpartition("/")[2]))) in self.lines
            }
            if lines:  # a sample without a line has no label
                labels = dict.fromkeys(labels) | lines
                options["accept_unmatched"] = True
            else:
                del options["labels"]
            text = "".join(f"{key},{label}\n" for key, label in lines.items())
            (self.root / "labels.csv").write_text(f"key,label\n{text}")
        if "classes" in options:
            (self.root / "classes.txt").write_text("".join(f"{name}\n" for name in self.order))
        return {**self.recipe, "fields": fields}, options, labels

    def wanted(self) -> Content:
        """What a build into an empty store makes, compared with what is computed here."""
        recipe, options, labels = self.request()
        named = {**options, "labels": labels, "order": getattr(self, "order", None)}
        state = repr((self.source.argument, self.source.expected(), recipe, named, self.code))
        if state not in self.fresh:
            request = {
                "code": str(self.root / "code"),
                "source": self.source.argument,
                "store": str(self.root / "fresh"),
                "recipe": recipe,
                "options": {**options, "max_failures": 1000},
            }
            if OTHER_TREE:
                made = content_of_other_tree(request)
            else:
                made = self.called(fresh_build.build_and_read, *list(request.values())[1:])
            if isinstance(made, str | Exception):
                raise AssertionError(f"a build into an empty store failed: {made}")
            self._check_fresh(made, recipe, options, labels)
            self.fresh[state] = made
        return self.fresh[state]

    def _check_fresh(
        self, made: Content, recipe: dict[str, Any], options: dict[str, Any], labels: dict[str, Any]
    ) -> None:
        samples, code = self.source.expected(), {}
        exec(self.code, code)  # the user's functions, as they are now
        right: dict[str, dict[str, Row]] = {}
        failed, unknown = set(), set()
        for name, field in recipe["fields"].items():
            right[name] = {}
            for key, sample in samples.items():
                try:
                    right[name][key] = row_of(sample, field["ops"], code)
                    if right[name][key][0] is None and "edit" in repr(field["ops"]):
                        unknown.add(key)
                except FailedSampleError:
                    failed.add(key)
        assert made["removed"] == {}
        assert failed <= made["failed"].keys() <= failed | unknown
        failed = set(made["failed"])
        for name, field in recipe["fields"].items():
            flips = any(op["op"] == "horizontal_flip" for op in field["ops"])
            for variant in range(field.get("variants", 1)):
                rows = made["rows"][name, variant]
                assert rows.keys() == samples.keys() - failed, (name, variant)
                for key, row in rows.items():
                    wanted, slack = right[name][key]
                    if wanted is None:
                        continue
                    assert (row.shape, row.dtype) == (wanted.shape, wanted.dtype), (name, key)
                    ways = [wanted, wanted[..., ::-1]] if flips else [wanted]
                    off = min(np.abs(row.astype(float) - way.astype(float)).max() for way in ways)
                    assert off <= slack, (name, variant, key, off)
            if name in made["mean"] and samples.keys() - failed:
                every = [r for (n, _), rows in made["rows"].items() if n == name
                         for r in rows.values()]  # fmt: skip
                values = np.stack(every).astype(np.float64)
                np.testing.assert_allclose(made["mean"][name], values.mean((0, 2, 3)), 1e-6, 1e-6)
                np.testing.assert_allclose(made["std"][name], values.std((0, 2, 3)), 1e-6, 1e-6)
        names = {label for label in labels.values() if isinstance(label, str)}
        classes = tuple(self.order if "classes" in options else sorted(names))
        if OTHER_TREE:  # its rows alone count: it may label by other rules
            made.update(labels=labels, classes=classes)
        assert made["labels"] == labels
        assert made["classes"] == classes

    # --- builds -----------------------------------------------------------------------------

    def built(self, function: Callable[..., Any] = build_here, **options: Any) -> Any:
        """Build from the source as it is now; returns the result, or the error that is raised."""
        recipe, own, _ = self.request()
        request = {"max_failures": 1000, **own, **options}
        made = precache.Recipe.from_dict(recipe)
        return self.called(function, self.source.argument, self.store, made, request)

    def called(self, function: Callable[..., Any], *values: Any) -> Any:
        """What a function returns or raises; in a process of its own if it runs the user's code."""
        if isinstance(self.source, Dataset) or "history_functions" in repr(self.recipe):
            return ask(in_child, str(self.root / "code"), function, *values)
        try:
            return function(*values)
        except PrecacheError as error:
            return error

    def build(self) -> str:
        options: dict[str, Any] = {"shard_samples": self.draw.choice([4, 4, 8, None])}
        for name, share in (("compact", 0.1), ("retry_failed", 0.15), ("recompute", 0.05),
                            ("keep_order", 0.1)):  # fmt: skip
            if self.draw.random() < share:
                options[name] = True
        if "recompute" in options:
            options.pop("retry_failed", None)
        if type(self.source) is Dataset and self.draw.random() < 0.3:
            options["compare"] = True
        if self.draw.random() < 0.1:
            options["verify"] = self.draw.random() < 0.5 and not self.unsure
        least, is_sure = self.stored_samples(), not self.unsure
        plan, result = self.built(plan_here, **options), self.built(**options)
        self.accept(result, options)
        if is_sure and not result.shards_skipped:
            reused, told = result.rows_reused, plan.rows_reused
            # Ops that are left for stored rows may fail: that is known with the build.
            assert told - result.failed <= reused <= told + plan.rows_compared
            assert reused >= least or "recompute" in options, f"{reused} rows are reused of {least}"
        return f"build {options}"

    def stored_samples(self) -> int:
        """How many samples have rows of all fields in versions of the store, by their own keys.

        Those that fail are left out, and so are versions of unknown content; for a dataset, whose
        keys are numbers, those of other sources.
        """
        if not self.has_versions() or self.unsure:
            return 0
        there = {each.version for each in precache.versions(self.store).versions}
        held = [self.held[version] for version in self.held.keys() & there]
        if isinstance(self.source, Dataset):
            held = [each for each in held if each.source is self.source]
        failed = self.wanted()["failed"]
        fields = self.rules(self.request()[0])
        return sum(
            all(any(each.serves(field, key, sample) for each in held) for field in fields)
            for key, sample in self.source.expected().items()
            if key not in failed
        )

    def rules(self, recipe: dict[str, Any]) -> list[list[Any]]:
        """For each variant of each field what decides its rows: the input, and then the ops."""
        rules = []
        for field in recipe["fields"].values():
            for variant in range(field.get("variants", 1)):
                rule: list[Any] = [field.get("input", "image")]
                for op in field["ops"]:
                    is_random = op["op"] in ("horizontal_flip", "random_resized_crop")
                    code = self.code if op["op"] == "function" else None
                    rule.append((dict(op), is_random and (recipe.get("seed"), variant), code))
                rules.append(rule)
        return rules

    def accept(self, result: Any, options: dict[str, Any] | None = None) -> None:
        """The build ended well, and its version is current."""
        if isinstance(result, PrecacheError) and self.unsure:
            result = self.follow(str(result), options or {})
        if isinstance(result, Exception):
            raise AssertionError(f"{type(result).__name__}: {result}") from result
        assert precache.open(self.store).id == result.version
        self.unsure.discard(result.version)
        self.expect(result.version)
        found = content(self.store)
        rules = self.rules(self.request()[0])
        samples, failed = self.source.expected(), set(found["failed"])
        self.held[result.version] = Held(self.source, rules, samples, failed)
        if (options or {}).get("compact"):
            assert found["removed"] == {}
        wanted = self.right[result.version]
        assert (result.samples, result.failed) == (len(wanted["labels"]), len(wanted["failed"]))

    def expect(self, version: str) -> None:
        """A version holds what is wanted now."""
        assert_same(self.right.setdefault(version, self.wanted()), self.wanted())

    def follow(self, advice: str, options: dict[str, Any]) -> Any:
        """Do what a text says until no more is said; returns the result of the last build."""
        for _ in range(3):
            for name in re.findall(r"remove (\S*zarr\.json)", advice):
                path = Path(name)
                [path] = [path] if path.is_absolute() else self.store.glob(f"*/{name}")
                path.unlink()
            said: dict[str, Any] = {}
            if "--recompute" in advice:
                said["recompute"] = True
            elif "--verify" in advice:
                said["verify"] = True
            else:
                assert "command again" in advice, advice
            result = self.built(**{**options, **said})
            if not isinstance(result, PrecacheError):
                return result
            assert isinstance(result, DOCUMENTED), result
            advice = str(result)
        return result

    def build_and_be_killed(self) -> str:
        at = self.draw.randrange(CHANGES)
        recipe, own, _ = self.request()
        process = start(
            in_child,
            str(self.root / "code"),
            build_until,
            at,
            self.source.argument,
            self.store,
            precache.Recipe.from_dict(recipe),
            {"max_failures": 1000, **own, "shard_samples": 4},
        )
        status = end(process)
        if self.unsure and status == 1:
            return f"killed at {at}: failed on damage"
        assert status in (0, -signal.SIGKILL), status
        if self.has_versions() and precache.open(self.store).id not in self.right:
            self.expect(precache.open(self.store).id)
        if status == 0:
            self.expect(precache.open(self.store).id)
        return f"killed at {at}: {status}"

    def build_and_fail(self) -> str:
        """More samples fail than may, or one where none may."""
        options = self.draw.choice([{"max_failures": 0}, {"on_error": "raise"}])
        failing = len(self.wanted()["failed"])
        result = self.built(**options)
        if isinstance(result, BuildError) and failing:
            return f"{options}: {failing} fail"
        self.accept(result)
        return f"{options}: {failing} fail, which is known"

    # --- versions ---------------------------------------------------------------------------

    def has_versions(self) -> bool:
        return any((self.store / "commits").glob("*.json"))

    def collect(self) -> str:
        if self.unsure or not self.right:
            return "not collected"
        if self.draw.random() < 0.3:
            status = end(start(collect_until, self.draw.randrange(CHANGES), self.store))
            assert status in (0, -signal.SIGKILL), status
            return f"collect: {status}"
        precache.gc(self.store, keep=self.draw.choice([1, 2, 3]), older_than=0)
        return "collect"

    def use_another(self) -> str:
        if self.unsure or not self.has_versions():
            return "not used"
        versions = sorted(each.version for each in precache.versions(self.store).versions)
        version = self.draw.choice(versions)
        precache.use(f"{self.store}@{version}")
        return f"use {version[:8]}"

    # --- damage -----------------------------------------------------------------------------

    def damage(self) -> str:
        """Damage an object of the version that is asked for, and follow what is said."""
        self.accept(self.built())
        version = precache.open(self.store).id
        what = self._spoil(version)
        self.said.append(what)
        says = self.draw.choice(["reader", "verify", "build", "other recipe", "later"])
        advice = "run the same command again"
        if says == "reader":
            advice = self._reading(version) or self._verifying() or advice
        elif says == "verify":
            advice = self._verifying() or advice
        elif says == "other recipe":
            before = self.recipe
            self.recipe = draw_recipe(self.draw, self.release)
            self.accept(self.built(shard_samples=4))
            self.recipe = before
        if says == "later":
            return f"damage {what}, and go on"
        result = self.follow(advice, {})
        assert not isinstance(result, PrecacheError), result
        self.accept(result)
        if self.unsure:  # versions that share the damage: no build of this one repairs them
            precache.gc(self.store, keep=0, older_than=0)
            self.unsure = {each for each in self.unsure if (self.store / each).exists()}
        return f"damage {what}, found by {says}"

    def _spoil(self, version: str) -> str:
        paths = sorted(path for path in (self.store / version).rglob("*") if path.is_file())
        records = sorted(path for path in (self.store / "_listings").rglob("*") if path.is_file())
        if self.draw.random() < 0.15 and records:
            paths = records
        path = self.draw.choice(paths)
        act = self.draw.choice(["lose", "flip", "cut", "empty"])
        self.unsure.add(version)
        if act != "lose":  # what is damaged in place is damaged in all versions that link to it
            self.unsure |= {
                each.relative_to(self.store).parts[0]
                for each in self.store.glob("*.*/**/*")
                if each.samefile(path)
            }
        data = bytearray(path.read_bytes())
        at = self.draw.randrange(max(1, len(data)))
        if act == "lose":
            path.unlink()
        elif act == "flip" and data:
            data[at] ^= 4
            path.write_bytes(data)
        else:
            os.truncate(path, len(data) // 2 if act == "cut" else 0)
        return f"{act} {path.relative_to(self.store)} at {at}"

    def _reading(self, version: str) -> str:
        """What a training says; if nothing, it reads what is right, or `verify` says something."""
        try:
            found = content(self.store)
        except DOCUMENTED as error:
            return str(error)
        if not same(found, self.right[version]):
            assert self._verifying(), "wrong content is read, and nothing tells of it"
        return ""

    def _verifying(self) -> str:
        try:
            found = precache.verify(self.store)
        except DOCUMENTED as error:
            return str(error)
        return "" if found.ok else str(found)

    # --- steps ------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        self.draw.seed(f"{self.seed}/{number}")
        self.said.append(f"{number}")
        for _ in range(self.draw.choice([0, 1, 1, 2])):
            self.said.append(self.edit())
        acts = [self.build] * 12 + [self.build_and_be_killed] * 2 + [self.damage] * 2
        acts += [self.build_and_fail, self.collect, self.use_another]
        self.said.append(self.draw.choice(acts)())
        self.check()

    def check(self) -> None:
        """The current version is whole and right, and all others are whole."""
        if not self.has_versions():
            return
        try:
            version = precache.open(self.store)
        except PrecacheError:
            assert self.unsure
            return
        if version.id not in self.unsure:
            verified = precache.verify(self.store)
            assert verified.ok, str(verified)
            assert_same(content(self.store), self.right[version.id])
        for each in () if self.unsure else precache.versions(self.store).versions:
            verified = precache.verify(f"{self.store}@{each.version}")
            assert verified.ok, str(verified)


def plan_here(source: str, store: Path, recipe: precache.Recipe, options: dict[str, Any]) -> Any:
    return precache.plan(source, store, recipe, address="serial", timing=False, **options)


def in_child(code: str, function: Callable[..., Any], *values: Any) -> Any:
    """Call a function where the user's modules are importable as they are now."""
    fresh_build.find_code(code)
    return function(*values)


def assert_same(found: Content, right: Content) -> None:
    for name in ("labels", "classes"):
        assert found[name] == right[name], name
    if OTHER_TREE:
        assert found["failed"].keys() == right["failed"].keys()
    else:
        assert found["failed"] == right["failed"]
    assert found["rows"].keys() == right["rows"].keys()
    for field, rows in right["rows"].items():
        assert found["rows"][field].keys() == rows.keys(), field
        other = [key for key, row in rows.items() if not equal(found["rows"][field][key], row)]
        assert not other, f"rows of {field} differ: {other}"
    for name in ("mean", "std"):
        assert found[name].keys() == right[name].keys()
        for field, values in right[name].items():
            np.testing.assert_allclose(found[name][field], values, 1e-9, 1e-9)


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def same(found: Content, right: Content) -> bool:
    try:
        assert_same(found, right)
    except AssertionError:
        return False
    return True


# --- builds into empty stores -------------------------------------------------------------------


def content_of_other_tree(request: dict[str, Any]) -> Content | str:
    """What a build of the other tree into an empty store makes, or the error that it raises."""
    server, answer = other_tree(), Path(request["store"]).with_name("answer")
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps({**request, "answer": str(answer)}), file=server.stdin, flush=True)
    status = server.stdout.readline()
    assert status == "0\n", status
    made: Content | str = pickle.loads(answer.read_bytes())
    return made


@functools.cache
def other_tree() -> subprocess.Popen[str]:
    """A process that builds with the other tree, and ends with this one."""
    path = os.pathsep.join([str(OTHER_TREE), f"{OTHER_TREE}/workers"])
    return subprocess.Popen(
        [sys.executable, fresh_build.__file__],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# --- tests --------------------------------------------------------------------------------------


def run(seed: int, steps: Iterator[int] | Sequence[int]) -> None:
    """Run a history of steps; a failure says all that was done."""
    root = Path(tempfile.mkdtemp(prefix="precache-history-"))
    history = History(seed, root)
    try:
        for number in steps:
            history.step(number)
    except BaseException as error:
        error.add_note(f"seed {seed}: {'; '.join(history.said)}")
        raise
    finally:
        if "PRECACHE_KEEP" not in os.environ:
            shutil.rmtree(root)


@pytest.mark.parametrize("seed", range(3))
def test_a_short_history(seed: int) -> None:
    run(seed, range(6))


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(10))
def test_a_long_history(seed: int) -> None:
    run(seed, range(30))


def reduced(seed: int, steps: list[int]) -> list[int]:
    """Leave out steps, one at a time, while the history still fails."""
    for number in reversed(steps[:-1]):
        fewer = [each for each in steps if each != number]
        try:
            run(seed, fewer)
        except Exception:
            steps = fewer
    return steps


if __name__ == "__main__":
    start_seed, *given = map(int, sys.argv[1:])
    numbers = list(range(given[0])) if len(given) == 1 else given
    try:
        run(start_seed, numbers)
    except Exception:
        print("reduced to steps", *reduced(start_seed, numbers))
        raise
