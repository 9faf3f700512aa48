"""A task file of the harness, made here: 204 documents, 144 with choices and 60 with an answer to write."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens",
    "Cuba": "Havana", "Peru": "Lima", "Norway": "Oslo", "Austria": "Vienna", "Poland": "Warsaw", "Ireland": "Dublin",
    "Russia": "Moscow", "China": "Beijing", "Germany": "Berlin", "Portugal": "Lisbon",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "left": "right", "fast": "slow", "old": "young",
    "rich": "poor", "wet": "dry", "hard": "soft", "high": "low", "open": "closed", "early": "late", "light": "dark",
    "true": "false", "happy": "sad",
}  # fmt: skip
KINDS = {
    "apple": "fruit", "carrot": "vegetable", "dog": "animal", "rose": "flower", "hammer": "tool", "piano": "instrument",
    "car": "vehicle", "shirt": "garment", "oak": "tree", "salmon": "fish", "eagle": "bird", "ant": "insect",
    "gold": "metal", "red": "color", "chess": "game", "bread": "food",
}  # fmt: skip
SHOTS = "Question: What is the plural of cat?\nAnswer: cats\n\nQuestion: Which color has grass?\nAnswer: green\n\n"


def questions() -> list[dict[str, Any]]:
    """Three wordings of each fact, four answers each."""
    rng = random.Random(0)
    documents = []
    for facts, wordings in (
        (CAPITALS, ("What is the capital of {}?", "Which city is the capital of {}?", "{} has which capital?")),
        (OPPOSITES, ("What is the opposite of {}?", "Which word means the opposite of {}?", "{} is the contrary of what?")),
        (KINDS, ("What kind of thing is {}?", "{} belongs to which kind?", "Which word describes what {} is?")),
    ):  # fmt: skip
        for wording in wordings:
            for what, answer in facts.items():
                choices = [answer, *rng.sample(sorted(set(facts.values()) - {answer}), 3)]
                rng.shuffle(choices)
                question = f"{SHOTS}Question: {wording.format(what)}\nAnswer:"
                documents.append({"question": question, "choices": choices, "label": choices.index(answer)})
    return documents


def exercises() -> list[dict[str, Any]]:
    """Words to go on with, sums, and facts: answers of one line."""
    rng = random.Random(1)
    documents = []
    for _ in range(20):
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        documents.append({"question": f"1 + 1 = 2\n2 + 3 = 5\n{a} + {b} =", "answer": str(a + b)})
        words = rng.sample(sorted(KINDS), 3)
        line = ", ".join(words)
        documents.append({"question": f"{line}\n{line}\n{', '.join(words[:2])},", "answer": words[2]})
        country = rng.choice(sorted(CAPITALS))
        documents.append({"question": f"{SHOTS}Question: What is the capital of {country}?\nAnswer:",
                          "answer": CAPITALS[country]})  # fmt: skip
    return documents


def write_tasks(folder: Path, *, num_questions: int | None = None, num_exercises: int | None = None) -> list[str]:
    """Writes both tasks with their documents; returns their names.

    Args:
        folder: to be given to the harness as `include_path`.
        num_questions: the first ones only; None: all. So is `num_exercises`.
    """
    shared = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "num_fewshot": 0}
    tasks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "tiny_questions": (
            questions()[:num_questions],
            {
                "output_type": "multiple_choice",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{label}}",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            },
        ),
        "tiny_exercises": (
            exercises()[:num_exercises],
            {
                "output_type": "generate_until",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
                "filter_list": [{"name": "first", "filter": [
                    {"function": "regex", "regex_pattern": "\\s*([A-Za-z0-9]+)"}, {"function": "take_first"},
                ]}],
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            },
        ),
    }  # fmt: skip
    for name, (documents, task) in tasks.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
        settings = {"task": name, "dataset_kwargs": {"data_files": {"test": str(path)}}, **shared, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return list(tasks)
