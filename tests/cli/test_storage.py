"""Tuning into a server and reading it: every command and the runtime take its URL, and none says its password."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from dmuon_tune.recipe import Group
from dmuon_tune.runtime import plan

from .conftest import Run

SHAPE = ("--shapes", "2x8x24", "--device", "cpu")
UNREACHABLE = "postgresql+psycopg://tuner:wrong-secret@127.0.0.1:1/muon"
SQLITE = ("sqlite://", "sqlite:///:memory:", "sqlite:///file.sqlite")
MALFORMED = ("://", "://host/muon", "Postgresql://host/muon", "post-gresql://host/muon", "//x://y")
PLACES = (("tune", "--storage"), ("tune", "--cache"), ("tune", "--dry-run", "--cache"), ("explain", "--cache"))
SECRETS = ("p@ss", "p%40ss", "w:rd", "wrong-secret")


@pytest.mark.usefixtures("lasting_workers")
def test_what_was_tuned_into_a_server_is_found_there(
    run: Run, new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_database()
    tuned = run("tune", *SHAPE, "--trials", "2", "--backends", "library", "--storage", url, "--format", "json")
    assert tuned.code == 0, tuned.err
    assert tuned.json["complete"] and tuned.json["cache"].startswith("postgresql+psycopg://tuner:***@127.0.0.1:")
    labels = [problem["label"] for problem in tuned.json["problems"]]
    shown = run("show", "--cache", url, "--device", "cpu", "--format", "json")
    listed = run("cache", "list", "--cache", url)
    explained = run("explain", *SHAPE, "--cache", url, "--format", "json")
    missing = run("explain", "--shapes", "2x8x40", "--device", "cpu", "--cache", url, "--require")
    planned = run("plan", "--shapes", "4x8x40", "--device", "cpu", "--cache", url, "--world-size", "2")
    for each in (missing, planned):
        assert " --cache postgresql+psycopg://tuner@127.0.0.1:" in each.err, each.err
    assert len(shown.json["winners"]) == len(labels) and shown.json["winners"][0]["layer"] == "server"
    assert listed.code == 0 and "***" in listed.out
    assert {row["origin"] for row in explained.json["products"]} == {"tuned"}

    monkeypatch.setenv("DMUON_TUNE_CACHE_PATH", url)
    layers = run("cache", "list", "--layers", "--format", "json")
    assert (layers.json["layers"][0]["state"], layers.json["layers"][0]["label"]) == ("ok", "path")
    doctor = run("doctor", "--format", "json")
    assert not doctor.json["caches"][0]["writable"]
    resolved = plan([Group(2, 8, 24)], "cpu")
    assert {(row["origin"], row["layer"]) for row in resolved.rows()} == {("tuned", "path")} and not resolved.missing
    said = json.dumps([vars(each) for each in (tuned, shown, listed, explained, missing, planned, layers, doctor)])
    assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("tune", "--storage", UNREACHABLE), 4, "cannot be reached"),
        (("tune", "--storage", UNREACHABLE, "--cache", "a.sqlite"), 2, "give one of them"),
        (("tune", "--storage", "tuner:wrong-secret@host/muon"), 2, "--storage takes a server's URL"),
        *((("tune", "--storage", text), 2, "--storage takes a server's URL") for text in SQLITE),
        *(((*command, text), 2, "URL is malformed") for command in PLACES for text in MALFORMED),
        *(((*command, "foo://host/muon"), 2, "is of no known database") for command in PLACES),
        *((("tune", "--cache", text), 2, "in memory ends with this process") for text in SQLITE[:2]),
        (("tune", "--storage", "postgresql+psycopg://tuner:x/@wrong-secret@host/muon"), 2, "%XX"),
        (("explain", "--cache", UNREACHABLE), 4, "cannot be reached"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(run: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    pytest.importorskip("psycopg")
    before = sorted(os.listdir())
    result = run(*arguments, *SHAPE)
    assert sorted(os.listdir()) == before, "a file was made"
    assert (result.code, result.out) == (code, "") and said in result.err and result.err.count("\n") == 1
    assert not any(secret in result.err for secret in SECRETS)
