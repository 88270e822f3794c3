"""The report as text: what matters first, readable and fast for large models, in one line per name."""

from __future__ import annotations

import time

import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from recfx import HashConfig, convert
from recfx.inspect.explain import explain
from recfx.inspect.report import Report, sections
from tests.builders.optimizers import attach
from tests.inspect.models import Wrapped, collection, config, towers


def small_report() -> Report:
    model, sample = towers()
    converted = convert(model, sample, hashing={"t1": HashConfig(dense_rows=0)}, on_unsupported="keep", verify=False)
    converted(*sample)
    return explain(converted)


def test_what_matters_comes_first() -> None:
    text = str(small_report())
    parts = ("NOT OK", "own_forward: own", "never_called: unused", "Indexes", "Collections", "Tables", "Nodes")
    places = [text.index(part) for part in (*parts, "weights_not_used: user.embedding_bags.t1")]
    assert places == sorted(places)
    assert text.isascii()  # also in a log that knows nothing else
    assert "\x1b" not in text
    assert "tests/inspect/models.py:" in text
    assert "site-packages" not in str(explain(collection()))


def test_a_thousand_tables() -> None:
    model = convert(
        EmbeddingBagCollection(tables=[config(number) for number in range(1000)]), hashing=HashConfig.raw_ids()
    )
    started = time.process_time()
    report = explain(model)
    explained = time.process_time()
    text, page = str(report), report.to_html()
    report.to_json()
    assert explained - started < 2.0
    assert time.process_time() - explained < 6.0
    assert len(text.splitlines()) < 60
    assert "... and 980 more" in text
    assert text.count("the table starts anew") == page.count("the table starts anew") == 1  # one reason for all
    assert "<td>t999</td>" in page


def test_the_fullest_index_is_the_first() -> None:
    model = Wrapped(collection(3))
    attach(model, torch.optim.SGD)
    converted = convert(model, hashing=HashConfig.raw_ids(buckets=1))
    features, lengths = [f"f{number}" for number in range(3)], torch.tensor([10, 90, 0])
    converted(KeyedJaggedTensor(features, torch.arange(100), lengths=lengths)).sum().backward()
    report = explain(converted)
    indexes = sections(report.collections)[0]
    assert [row[0] for row in indexes.rows][:2] == ["t1", "t0"]
    assert str(report).index("index_nearly_full") < str(report).index("Indexes")
