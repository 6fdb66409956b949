"""The file of --product-algorithms: read, malformed, compared with the digest of a saved configuration or a checkpoint."""

import dataclasses
import json

import pytest

from megatrain.config import ConfigError, Facts, StoredRun
from megatrain.config.product_algorithms import (
    MeasuredAlgorithm,
    Product,
    ProductAlgorithms,
    digest_of,
)

ENTRY = MeasuredAlgorithm(
    product=Product(256, 192, 64, False, True, False), algorithm="01" * 64, ms=1.5, torch_ms=1.75
)
FILE = ProductAlgorithms(gpu="NVIDIA H200", cublaslt=130100, entries=(ENTRY,))
TEXT = FILE.to_json()
GPU = Facts(device="cuda", product_algorithms=TEXT)
FLAGS = "--bf16 --product-algorithms a.json"


def test_a_file_is_read_as_it_was_written():
    assert ProductAlgorithms.from_json(TEXT) == FILE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.pop("gpu"), "not an object with gpu"),
        (lambda c: c.update(cublaslt="13"), "cublaslt '13', which is not of type int"),
        (lambda c: c["products"].append(c["products"][0]), "product 2 has two entries"),
        (lambda c: c["products"][0].update(m=0), "product 1 has a size below 1"),
        (lambda c: c["products"][0].update(k=True), "k True, which is not of type int"),
        (lambda c: c["products"][0].update(algorithm="01"), "no algorithm of 64 bytes"),
        (lambda c: c["products"][0].update(algorithm="x" * 128), "fromhex"),
        (lambda c: c["products"][0].update(alpha=1), "product 1 is not an object with m, n"),
        (lambda c: c.update(products=[[]]), "product 1 is not an object"),
    ],
)
def test_a_malformed_file_has_a_reason(change, reason):
    content = json.loads(TEXT)
    change(content)
    with pytest.raises(ValueError, match=reason):
        ProductAlgorithms.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null"])
def test_other_contents_are_malformed(text):
    with pytest.raises(ValueError, match=r"Expecting|nested|not an object"):
        ProductAlgorithms.from_json(text)


def test_the_plan_has_the_algorithms_and_stores_the_digest(plan_of):
    plan = plan_of(FLAGS, facts=GPU)
    assert plan.derived.product_algorithms == FILE
    assert plan.config.training.product_algorithms_digest == digest_of(TEXT)
    assert plan.config.to_dict()["training"]["product_algorithms_digest"] == digest_of(TEXT)
    (note,) = [note for note in plan.notes if "--product-algorithms" in note]
    assert note == (
        "--product-algorithms a.json: 1 product, measured on NVIDIA H200 with cuBLASLt 130100; others use torch's choice"
    )
    assert Facts.from_json(GPU.to_json()).product_algorithms == TEXT
    assert plan_of("").derived.product_algorithms is None


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        (FLAGS, dataclasses.replace(GPU, device="cpu"), "has no effect on a CPU"),
        ("--product-algorithms a.json", GPU, "has no effect without --bf16"),
    ],
)
def test_it_may_have_no_effect(plan_of, flags, facts, reason):
    notes = [note for note in plan_of(flags, facts=facts).notes if "--product-algorithms" in note]
    assert notes == [f"--product-algorithms a.json {reason}"]


def test_a_changed_file_is_a_note_on_resume(plan_of):
    stored = StoredRun(
        path="c", iteration=1, consumed_train_samples=2, config=plan_of(FLAGS, facts=GPU).config.to_dict()
    )
    other = dataclasses.replace(GPU, product_algorithms=TEXT + "\n", checkpoint=stored)
    change = f"--product-algorithms-digest {digest_of(TEXT)} -> {digest_of(TEXT + chr(10))}"
    assert any(change in note for note in plan_of(f"{FLAGS} --load c", facts=other).notes)
    same = dataclasses.replace(other, product_algorithms=TEXT)
    moved = FLAGS.replace("a.json", "b.json")
    assert not any("digest" in note for note in plan_of(f"{moved} --load c", facts=same).notes)


def test_another_digest_than_the_saved_one_is_refused(plan_of):
    plan_of(f"{FLAGS} --product-algorithms-digest {digest_of(TEXT)}", facts=GPU)
    with pytest.raises(
        ConfigError, match=r"--product-algorithms a.json: the digest is \w+, and[\s\S]* is 0123"
    ):
        plan_of(f"{FLAGS} --product-algorithms-digest 0123", facts=GPU)
