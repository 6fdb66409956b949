"""Thousands of damaged pairs: each is an error, or is read exactly as a simple reference reader reads it.

a valid pair -> mutated (seeded) -> reference reader: error, or the tokens of every sample
                                 -> megatrain:        error, or the same tokens of every sample

An error for a pair that the reference reader accepts is a failure, too.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from damaged_pairs import VOCAB, bin_, idx, write_pair
from everyday import one_in

from megatrain.config.errors import ConfigError
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import build_index
from megatrain.data.samples.sources import open_token_ids

NUM_INPUTS = 1000
NUM_PARTS = 4
"""Tests that divide the inputs, so that they can run in parallel."""
SEQ_LENGTH = 8
SEED = 11
WIDTHS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Format characters of `struct` for the integer element codes."""


class InvalidPairError(Exception):
    """The bytes are not a valid pair."""


def require(is_right):
    if not is_right:
        raise InvalidPairError


# ---- the reference reader: the documented format, one number at a time


def stored_sequences(index, elements):
    """Return the sequences in the bytes of an .idx and a .bin."""
    require(len(index) >= 34 and index[:9] == b"MMIDIDX\0\0")
    version, code, num_sequences, num_boundaries = struct.unpack_from("<QBQQ", index, 9)
    require(version == 1 and code in WIDTHS and num_boundaries > 0)
    plain_size = 34 + 12 * num_sequences + 8 * num_boundaries
    require(len(index) in (plain_size, plain_size + num_sequences))
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    offsets = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    boundaries = struct.unpack_from(f"<{num_boundaries}q", index, 34 + 12 * num_sequences)
    require(all(length >= 0 for length in lengths))
    require(boundaries[0] == 0 and boundaries[-1] == num_sequences and list(boundaries) == sorted(boundaries))
    width = struct.calcsize(WIDTHS[code])
    position, sequences = 0, []
    for length, offset in zip(lengths, offsets, strict=True):
        require(offset == position)
        position += width * length
        require(position <= len(elements))
        sequences.append(struct.unpack_from(f"<{length}{WIDTHS[code]}", elements, offset))
    require(position == len(elements))
    return sequences


def reference_samples(index, elements):
    """Return the tokens of every sample of one epoch, in shuffled order."""
    sequences = stored_sequences(index, elements)
    random = np.random.RandomState(SEED)
    order = np.arange(len(sequences), dtype=np.int32)
    random.shuffle(order)
    text = [token for number in order.tolist() for token in sequences[number]]
    require(text)
    count = (len(text) - 1) // SEQ_LENGTH
    require(all(0 <= token < VOCAB for token in text[: count * SEQ_LENGTH + 1] if count))
    shuffled = np.arange(count, dtype=np.uint32)
    random.shuffle(shuffled)
    return [text[k * SEQ_LENGTH : (k + 1) * SEQ_LENGTH + 1] for k in shuffled.tolist()]


def read_samples(prefix, *, mmap):
    dataset = open_token_ids(str(prefix), mmap=mmap)
    index = build_index(
        dataset.lengths, range(len(dataset)), seq_length=SEQ_LENGTH, seed=SEED, num_samples=None
    )
    samples = GPTDataset(dataset, index, SampleOptions(seq_length=SEQ_LENGTH, eod=0, vocab_size=VOCAB))
    found = []
    for k in range(len(samples)):
        sample = samples[k]
        assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()
        found.append([*sample.tokens.tolist(), int(sample.labels[-1])])
    return found


# ---- mutations: each changes the two files with a generator


@dataclass
class Pair:
    """The bytes of both files."""

    index: bytearray
    elements: bytearray

    def either(self, random):
        """Return one of the files; the index twice as often."""
        return self.elements if random.integers(3) == 0 else self.index

    def counts(self):
        return struct.unpack_from("<QQ", self.index, 18)


def flip_bits(pair, random):
    content = pair.either(random)
    for position in random.integers(0, len(content), random.integers(1, 4)).tolist():
        content[position] ^= 1 << int(random.integers(8))


def truncate(pair, random):
    content = pair.either(random)
    del content[int(random.integers(len(content))) :]


def lengthen(pair, random):
    pair.either(random).extend(random.bytes(int(random.integers(1, 20))))


def zero_a_range(pair, random):
    content = pair.either(random)
    start = int(random.integers(len(content)))
    content[start : start + 16] = bytes(len(content[start : start + 16]))


def take_from_another(pair, random, others):
    other = others[int(random.integers(len(others)))]
    if random.integers(2):
        pair.index[:] = other.index
    else:
        pair.elements[:] = other.elements


def swap_files(pair, random):
    pair.index[:], pair.elements[:] = bytes(pair.elements), bytes(pair.index)


SPECIAL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def edit_header(pair, random):
    position, kind = [(9, "Q"), (17, "B"), (18, "Q"), (26, "Q")][int(random.integers(4))]
    value = SPECIAL[int(random.integers(len(SPECIAL)))]
    struct.pack_into(f"<{kind}", pair.index, position, value % 256 if kind == "B" else value)


def edit_counts(pair, random):
    """Trade sequences for boundaries at nearly the same size: a boundary has 8 bytes, a sequence 12."""
    sequences, boundaries = pair.counts()
    change = int(random.integers(-2, 3))
    struct.pack_into("<QQ", pair.index, 18, max(0, sequences + 2 * change), max(0, boundaries - 3 * change))


def edit_an_array(pair, random):
    sequences, boundaries = pair.counts()
    start, count, kind = [
        (34, sequences, "i"),
        (34 + 4 * sequences, sequences, "q"),
        (34 + 12 * sequences, boundaries, "q"),
    ][int(random.integers(3))]
    position = start + struct.calcsize(kind) * int(random.integers(count))
    value = struct.unpack_from(f"<{kind}", pair.index, position)[0] + int(random.integers(-3, 4))
    struct.pack_into(f"<{kind}", pair.index, position, value)


def move_a_boundary(pair, random):
    """Move a sequence boundary: the result is a valid pair, or has a negative length."""
    sequences, _ = pair.counts()
    lengths = list(struct.unpack_from(f"<{sequences}i", pair.index, 34))
    sequence = int(random.integers(sequences - 1))
    change = int(random.integers(-9, 10))
    lengths[sequence] += change
    lengths[sequence + 1] -= change
    width = 2
    offsets = [width * sum(lengths[:number]) for number in range(sequences)]
    struct.pack_into(f"<{sequences}i{sequences}q", pair.index, 34, *lengths, *offsets)


def change_ids(pair, random):
    """Change ids, mostly within the vocabulary: all sizes agree, so the pair must be read as it is stored."""
    for position in random.integers(0, len(pair.elements) // 2, 3).tolist():
        struct.pack_into("<H", pair.elements, 2 * position, int(random.integers(VOCAB + 3)))


def change_the_type(pair, random):
    pair.index[17] = int(random.integers(0, 10))


def add_modes(pair, random):
    """Append a mode for each sequence, as in multimodal datasets; tokens do not change."""
    pair.index.extend(random.bytes(min(pair.counts()[0], len(pair.index))))


def nothing(pair, random):
    """Keep the valid pair."""


MUTATIONS = [
    flip_bits,
    flip_bits,
    flip_bits,
    truncate,
    lengthen,
    zero_a_range,
    take_from_another,
    swap_files,
    edit_header,
    edit_counts,
    edit_an_array,
    move_a_boundary,
    change_ids,
    change_the_type,
    add_modes,
    nothing,
]


def mutated(good, others, random):
    """Return a copy after one or two mutations, and their names."""
    pair = Pair(bytearray(good.index), bytearray(good.elements))
    names = []
    for number in random.integers(len(MUTATIONS), size=int(random.integers(1, 3))).tolist():
        mutation = MUTATIONS[number]
        names.append(mutation.__name__)
        try:
            mutation(pair, random, others) if mutation is take_from_another else mutation(pair, random)
        except (struct.error, ValueError, IndexError, OverflowError):
            break  # the first mutation left nothing for the second one to change
    return pair, " ".join(names)


def pair_of(prefix):
    return Pair(bytearray(idx(prefix).read_bytes()), bytearray(bin_(prefix).read_bytes()))


@pytest.mark.parametrize("part", one_in(NUM_PARTS, range(NUM_PARTS)))
def test_a_mutated_pair_is_an_error_or_read_as_it_is(tmp_path, part):
    good = pair_of(write_pair(tmp_path / "good", with_description=False))
    others = [
        pair_of(write_pair(tmp_path / f"other{seed}", seed=seed, with_description=False)) for seed in (1, 2)
    ]
    others.append(pair_of(write_pair(tmp_path / "wide", dtype="int32", with_description=False)))
    prefix = tmp_path / "mutated"
    outcomes = {"error": 0, "read": 0, "equal": 0}
    for number in range(part, NUM_INPUTS, NUM_PARTS):
        random = np.random.default_rng([SEED, number])
        pair, names = mutated(good, others, random)
        Path(idx(prefix)).write_bytes(pair.index)
        Path(bin_(prefix)).write_bytes(pair.elements)
        label = f"input {number} ({names})"
        found, expected, message = None, None, ""
        with contextlib.suppress(InvalidPairError):
            expected = reference_samples(pair.index, pair.elements)
        try:
            found = read_samples(prefix, mmap=bool(random.integers(2)))
        except ConfigError as error:
            message = str(error)
        assert found == expected, f"{label}: {message}"
        assert (found is None) == ("fix: " in message), label
        is_good = (pair.index, pair.elements) == (good.index, good.elements)
        outcomes["error" if found is None else "equal" if is_good else "read"] += 1
    assert all(outcomes.values()), outcomes
