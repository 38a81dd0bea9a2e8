"""The instruction set: the same everywhere, varied, and right - each answer against a solver written another way."""

from __future__ import annotations

import calendar
import hashlib
import json
import re
from datetime import date, timedelta

import pytest

from finetune.data import load_rows
from instructions import TASKS, generate

ROWS = generate()


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]+)"', text)


def rows_of(task: str) -> list[dict[str, str]]:
    return generate(150, seed=11, tasks=[task])


def test_same_rows_everywhere() -> None:
    digest = hashlib.sha256(json.dumps(generate(500, seed=3), ensure_ascii=False).encode()).hexdigest()
    assert digest[:16] == "69dd4f95266c740a"
    assert generate(50, seed=3) == generate(500, seed=3)[:50]
    assert generate(50, seed=4) != generate(50, seed=3)


def test_the_embedded_rows_are_those_of_the_generator() -> None:
    assert [vars(row) for row in load_rows("embedded")] == ROWS


def test_size_and_variety() -> None:
    assert len(ROWS) == 4096
    assert len(TASKS) >= 12
    assert all(set(row) == {"instruction", "input", "output"} for row in ROWS)
    assert all(row["instruction"].strip() and row["output"].strip() for row in ROWS)
    assert 0.35 <= sum(bool(row["input"]) for row in ROWS) / len(ROWS) <= 0.45
    assert len({(row["instruction"], row["input"]) for row in ROWS}) >= 0.99 * len(ROWS)
    lengths = sorted(len(" ".join(row.values()).split()) for row in ROWS)
    assert lengths[0] <= 12
    assert 100 <= lengths[-1] <= 160


def test_unknown_task_and_size_are_named() -> None:
    with pytest.raises(ValueError, match="unknown task 'poetry'; the tasks are arithmetic"):
        generate(1, tasks=["poetry"])
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        generate(0)


def test_arithmetic() -> None:
    for row in rows_of("arithmetic"):
        expression = row["input"] or row["output"].split(" = ")[0]
        assert re.fullmatch(r"[\d +x-]+", expression)
        assert numbers(row["output"])[-1] == eval(expression.replace("x", "*"))
        if not row["input"]:
            assert sorted(numbers(expression)) == sorted(numbers(row["instruction"]))


def test_word_problem() -> None:
    for row in rows_of("word_problem"):
        has, more, given = numbers(row["input"])
        assert numbers(row["output"])[-1] == has + more - given


def test_sorting_and_reversing() -> None:
    for row in rows_of("sort_numbers"):
        expected = sorted(numbers(row["input"]))
        assert numbers(row["output"]) == (expected[::-1] if "descending" in row["instruction"] else expected)
    for row in rows_of("sort_words"):
        assert row["output"].split(", ") == sorted(row["input"].split(", "))
    for row in rows_of("reverse"):
        if row["input"]:
            assert row["output"].split()[::-1] == row["input"].split()
        else:
            assert row["output"].replace(" ", "")[::-1] == quoted(row["instruction"])[0]


def test_counting_letters() -> None:
    for row in rows_of("count_letters"):
        *letter, word = quoted(row["instruction"])
        expected = sum(c == letter[0] for c in word) if letter else len(word)
        assert numbers(row["output"]) == [expected]


def test_units() -> None:
    small = {"kilometres": 10**6, "metres": 1000, "centimetres": 10, "millimetres": 1, "kilograms": 1000, "grams": 1}
    small |= {"litres": 1000, "millilitres": 1, "weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60}
    small |= {"seconds": 1, "years": 12, "months": 1, "dozens": 12, "pieces": 1, "yards": 36, "feet": 12, "inches": 1}
    for row in rows_of("unit_conversion"):
        (count, start) = re.search(r"(\d+) (\w+)[.?]?(?: to|$)", row["instruction"]).groups()  # type: ignore[union-attr]
        (answer, end) = re.search(r"(\d+) (\w+)\.$", row["output"]).groups()  # type: ignore[union-attr]
        assert int(count) * small[start] == int(answer) * small[end]


def test_sequence_and_comparison_and_multiplication() -> None:
    for row in rows_of("sequence"):
        shown = numbers(row["instruction"])
        assert numbers(row["output"])[-1] == 2 * shown[-1] - shown[-2]
    for row in rows_of("comparison"):
        if row["input"]:
            (first, a), (second, b) = re.findall(r"(\w+) has (\d+) points", row["input"])
            winner, loser = (first, second) if int(a) > int(b) else (second, first)
            assert row["output"] == f"{winner} has {abs(int(a) - int(b))} more points than {loser}."
        else:
            assert numbers(row["output"]) == sorted(numbers(row["instruction"]), reverse=True)
    for row in rows_of("multiplication_table"):
        base, first, last = numbers(row["instruction"])
        triples = [numbers(line) for line in row["output"].split("\n")]
        assert [triple[0] for triple in triples] == list(range(first, last + 1))
        assert all(a * b == c and b == base for a, b, c in triples)


def test_dates_and_clock() -> None:
    months, weekdays = list(calendar.month_name), list(calendar.day_name)

    def parse(text: str) -> date:
        day, month, year = re.search(r"(\d+) ([A-Z]\w+) (\d{4})", text).groups()  # type: ignore[union-attr]
        return date(int(year), months.index(month), int(day))

    for row in rows_of("dates"):
        if row["instruction"].startswith("Today"):
            today = next(day for day in weekdays if day in row["instruction"])
            ahead = numbers(row["instruction"])[0]
            assert row["output"].endswith(f"{weekdays[(weekdays.index(today) + ahead) % 7]}.")
        else:
            later = timedelta(numbers(row["instruction"])[0])
            assert parse(row["output"]) == parse(row["instruction"]) + later
    for row in rows_of("clock"):
        hour, minute, wait = numbers(row["instruction"])
        arrival = divmod((60 * hour + minute + wait) % 1440, 60)
        assert row["output"] == f"It arrives at {arrival[0]}:{arrival[1]:02d}."


def test_reading_is_answered_by_the_text() -> None:
    for row in rows_of("reading"):
        answer = row["output"].rstrip(".").split()[-1]
        assert answer in row["input"].replace(".", " ").split()


def test_odd_one_out_is_unique() -> None:
    from instructions.vocabulary import GROUPS

    for row in rows_of("odd_one_out"):
        listed = row["input"].split(", ")
        group_of = {word: group for group, members in GROUPS.items() for word in members}
        groups = [group_of[word] for word in listed]
        stranger = row["output"].split()[0].lower()
        assert groups.count(group_of[stranger]) == 1
        assert len(set(groups)) == 2


def test_story_has_as_many_sentences_as_asked() -> None:
    for row in rows_of("story"):
        assert row["output"].count(".") == numbers(row["instruction"])[0]
