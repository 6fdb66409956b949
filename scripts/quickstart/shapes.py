r"""Makes a set of images with questions: coloured shapes on a plain ground, 64 x 64 pixels. Or counts right answers.

    python scripts/quickstart/shapes.py runs/shapes                     images, train.jsonl, corpus.jsonl, questions.jsonl
    megatrain generate ... --prompt-file runs/shapes/questions.jsonl --json | python scripts/quickstart/shapes.py runs/shapes --score

train.jsonl has four rows for each image, a question and its answer each. No image of questions.jsonl is among
those of train.jsonl. With --at-least 0.95 the exit code of --score is 1 below 95 % right answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 64
COLOURS = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (240, 210, 40), "purple": (140, 50, 170),
    "white": (250, 250, 250),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")


def draw(colour: str, shape: str, place: str, rng: random.Random) -> Image.Image:
    """Return an image with a shape somewhere in its quarter, on a dark ground of any shade."""
    shade = rng.randrange(20, 70)
    image = Image.new("RGB", (SIZE, SIZE), (shade, shade, shade))
    canvas, r = ImageDraw.Draw(image), rng.randrange(9, 13)
    near, far = SIZE // 4, 3 * SIZE // 4
    x = (near if "left" in place else far) + rng.randint(-3, 3)
    y = (near if "top" in place else far) + rng.randint(-3, 3)
    fill = tuple(max(0, min(255, value + rng.randrange(-15, 16))) for value in COLOURS[colour])
    if shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        canvas.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        canvas.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=fill)
    else:
        canvas.rectangle((x - r // 3, y - r, x + r // 3, y + r), fill=fill)
        canvas.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=fill)
    return image


def questions(colour: str, shape: str, place: str) -> dict[str, str]:
    """Return the questions about an image, each with its answer."""
    return {
        "What colour is the shape?": colour,
        "Which shape is it?": shape,
        "Where is the shape?": place,
        "Describe the image.": f"A {colour} {shape} at the {place}.",
    }


def write(folder: Path, num_images: int, num_held_out: int, seed: int) -> None:
    """Write the set."""
    rng, seen = random.Random(seed), set()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows, held_out, num_trained = [], [], 0
    while num_trained < num_images:
        facts = rng.choice(sorted(COLOURS)), rng.choice(SHAPES), rng.choice(PLACES)
        image = draw(*facts, rng)
        if image.tobytes() in seen:
            continue
        seen.add(image.tobytes())
        name = f"images/{len(seen):05}.png"
        image.save(folder / name)
        asked = list(questions(*facts).items())
        rng.shuffle(asked)
        if len(held_out) < num_held_out:
            question, answer = asked[0]
            prompt = f"USER: <image>\n{question} ASSISTANT:"
            held_out.append({"prompt": prompt, "images": [name], "answer": answer})
            continue
        num_trained += 1
        for question, answer in asked:
            turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
            rows.append({"image": name, "conversations": turns})
    texts = [{"text": " ".join(turn["value"] for turn in row["conversations"])} for row in rows[:500]]
    for name, found in (("train", rows), ("corpus", texts), ("questions", held_out)):
        lines = "".join(json.dumps(one) + "\n" for one in found)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def score(folder: Path, at_least: float) -> int:
    """Compare answers on standard input, of `megatrain generate --json`, with the right ones; return the exit code."""
    wanted = [json.loads(line) for line in (folder / "questions.jsonl").open(encoding="utf-8")]
    given = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    if [one["prompt"] for one in given] != [one["prompt"] for one in wanted]:
        print(f"{len(given)} answers, which are not to the {len(wanted)} questions of {folder}")
        return 2
    right = [one["text"].strip() == other["answer"] for one, other in zip(given, wanted, strict=True)]
    for one, other, is_right in zip(given, wanted, right, strict=True):
        if not is_right:
            print(f"{other['images'][0]}: {one['text'].strip()!r}, not {other['answer']!r}")
    share = sum(right) / len(right)
    print(f"{sum(right)} of {len(right)} answers are right: {share:.1%}")
    return 0 if share >= at_least else 1


def main() -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--score", action="store_true", help="count right answers on standard input")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="of right answers [0]")
    arguments = parser.parse_args()
    if arguments.score:
        return score(arguments.folder, arguments.at_least)
    write(arguments.folder, arguments.images, arguments.held_out, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
