"""The kinds of task in the embedded instruction set: each is a function of a random source and makes one row.

Every answer is computed, or looked up in ``vocabulary.py``, never guessed, so that a model can learn something from it.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from instructions import vocabulary as words

Item = TypeVar("Item")
Row = tuple[str, str, str]  # instruction, input, output
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Draw:
    """Choices from one seeded source.

    Made of ``Random.random()`` alone: of all of ``random`` only it is promised to stay the same in every Python.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.between(0, len(items) - 1)]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """``count`` different positions of ``items``, in random order."""
        left = list(items)
        return [left.pop(self.between(0, len(left) - 1)) for _ in range(count)]


def _join(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _article(word: str) -> str:
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def _day(date: datetime.date) -> str:
    return f"{date.day} {MONTHS[date.month - 1]} {date.year}"


def arithmetic(draw: Draw) -> Row:
    a, b = draw.between(2, 99), draw.between(2, 99)
    kind = draw.between(0, 3)
    if kind == 0:
        return f"Add {a} and {b}.", "", f"{a} + {b} = {a + b}."
    if kind == 1:
        a, b = max(a, b), min(a, b)
        return f"Subtract {b} from {a}.", "", f"{a} - {b} = {a - b}."
    if kind == 2:
        a, b = a % 12 + 1, b % 12 + 1
        return f"Multiply {a} by {b}.", "", f"{a} x {b} = {a * b}."
    return "Work out the result.", f"{a} + {b} - {min(a, b)}", f"The result is {a + b - min(a, b)}."


def word_problem(draw: Draw) -> Row:
    name, friend = draw.some(words.NAMES, 2)
    thing = draw.pick(words.COUNTED)
    has, more, given = draw.between(5, 40), draw.between(2, 30), draw.between(1, 5)
    story = f"{name} has {has} {thing}. {name} buys {more} more and gives {given} to {friend}."
    answer = (
        f"{name} starts with {has} {thing}. After buying {more} more there are {has} + {more} = {has + more}. After "
        f"giving {given} to {friend} there are {has + more} - {given} = {has + more - given}. "
        f"The answer is {has + more - given} {thing}."
    )
    return f"How many {thing} does {name} have now? Explain step by step.", story, answer


def sort_numbers(draw: Draw) -> Row:
    numbers = [draw.between(1, 99) for _ in range(draw.between(3, 8))]
    falling = draw.between(0, 1) == 1
    order = "descending" if falling else "ascending"
    text = ", ".join(map(str, sorted(numbers, reverse=falling)))
    return f"Sort these numbers in {order} order.", ", ".join(map(str, numbers)), text


def sort_words(draw: Draw) -> Row:
    chosen = draw.some(words.TRANSLATIONS, draw.between(3, 7))
    listed = [entry[0] for entry in chosen]
    return "Put these words in alphabetical order.", ", ".join(listed), ", ".join(sorted(listed))


def reverse(draw: Draw) -> Row:
    if draw.between(0, 1):
        word = draw.pick(words.TRANSLATIONS)[0]
        return f'Spell the word "{word}" backwards.', "", " ".join(reversed(word))
    listed = [entry[0] for entry in draw.some(words.TRANSLATIONS, draw.between(3, 6))]
    return "Reverse the order of the words.", " ".join(listed), " ".join(reversed(listed))


def count_letters(draw: Draw) -> Row:
    word = draw.pick(words.TRANSLATIONS)[0]
    if draw.between(0, 2) == 0:
        return f'How many letters are in the word "{word}"?', "", f'The word "{word}" has {len(word)} letters.'
    letter = draw.pick(word + "aeiou")
    times = word.count(letter)
    found = f"{times} time" if times == 1 else f"{times} times"
    question = f'How often does the letter "{letter}" occur in the word "{word}"?'
    return question, "", f'The letter "{letter}" occurs {found} in "{word}".'


def translation(draw: Draw) -> Row:
    place = draw.between(0, 2)
    language = ("French", "Spanish", "German")[place]
    chosen = draw.some(words.TRANSLATIONS, draw.between(1, 4))
    if len(chosen) == 1:
        english, foreign = chosen[0][0], chosen[0][place + 1]
        answer = f'The {language} word for "{english}" is "{foreign}".'
        return f'What is the {language} word for "{english}"?', "", answer
    lines = "\n".join(f"{entry[0]}: {entry[place + 1]}" for entry in chosen)
    return f"Translate the words into {language}.", ", ".join(entry[0] for entry in chosen), lines


def unit_conversion(draw: Draw) -> Row:
    one, large, small, factor = draw.pick(words.UNITS)
    count = draw.between(2, 60)
    if draw.between(0, 1):
        question = f"Convert {count} {large} to {small}."
        return question, "", f"One {one} has {factor} {small}, so {count} {large} are {count * factor} {small}."
    question = f"How many {large} are {count * factor} {small}?"
    return question, "", f"{count * factor} {small} divided by {factor} are {count} {large}."


def classification(draw: Draw) -> Row:
    group = draw.pick(tuple(words.GROUPS))
    word = draw.pick(words.GROUPS[group])
    choices = draw.some([group, *draw.some([g for g in words.GROUPS if g != group], 2)], 3)
    question = f"Classify the word as {_article(choices[0])}, {_article(choices[1])} or {_article(choices[2])}."
    return question, word, f"{word.capitalize()} is {_article(group)}."


def sentiment(draw: Draw) -> Row:
    good = draw.between(0, 1) == 1
    thing, name = draw.pick(words.SHOP_ITEMS), draw.pick(words.NAMES)
    reasons = draw.some(words.PRAISE if good else words.COMPLAINTS, 2)
    text = f"{name} bought the {thing} last week. {reasons[0].capitalize()}, and {reasons[1]}."
    verdict = "positive" if good else "negative"
    answer = f"The review is {verdict}, because it says that {reasons[0]} and that {reasons[1]}."
    return "Is this review positive or negative? Give the reason.", text, answer


def sequence(draw: Draw) -> Row:
    start, step = draw.between(1, 30), draw.between(2, 12)
    shown = [start + step * i for i in range(draw.between(3, 6))]
    answer = f"Each number is {step} more than the one before, so the next number is {shown[-1] + step}."
    return "What is the next number in the sequence " + ", ".join(map(str, shown)) + "?", "", answer


def reading(draw: Draw) -> Row:
    name, city = draw.pick(words.NAMES), draw.pick(words.CAPITALS)[1]
    job, place = draw.pick(words.JOBS)
    hobby, pet, age = draw.pick(words.HOBBIES), draw.pick(words.GROUPS["animal"]), draw.between(21, 65)
    facts = [
        (f"{name} lives in {city}.", f"Where does {name} live?", f"{name} lives in {city}."),
        (f"{name} works as {_article(job)} in a {place}.", f"What is {name}'s job?", f"{name} is {_article(job)}."),
        (f"In the evening {name} likes {hobby}.", f"What does {name} like in the evening?", f"{name} likes {hobby}."),
        (f"At home {name} keeps {_article(pet)}.", f"Which animal does {name} keep?", f"{name} keeps {_article(pet)}."),
        (f"{name} is {age} years old.", f"How old is {name}?", f"{name} is {age} years old."),
    ]
    told = draw.some(facts, draw.between(2, 5))
    asked = draw.pick(told)
    return f"Read the text and answer the question: {asked[1]}", " ".join(fact[0] for fact in told), asked[2]


def rewriting(draw: Draw) -> Row:
    name, when = draw.pick(words.NAMES), draw.pick(words.TIMES)
    present, past, thing = draw.pick(words.VERBS)
    sentence = f"{name} {present} the {thing} {when}."
    style = draw.between(0, 2)
    if style == 0:
        return "Rewrite the sentence in the past tense.", sentence, f"{name} {past} the {thing} {when}."
    if style == 1:
        return "Rewrite the sentence in capital letters.", sentence, sentence.upper()
    return f'Replace "{name}" by "the teacher".', sentence, f"The teacher {present} the {thing} {when}."


def list_making(draw: Draw) -> Row:
    group = draw.pick(tuple(words.GROUPS))
    chosen = draw.some(words.GROUPS[group], draw.between(3, 7))
    lines = "\n".join(f"{place}. {word.capitalize()}" for place, word in enumerate(chosen, 1))
    ask = draw.pick(("Name {} examples of {}.", "List {} examples of {}.", "Give me {} examples of {}."))
    first = chosen[0]
    kind = words.GROUP_PLURALS[group]
    return ask.format(len(chosen), kind) + f" Start with {first}.", "", lines


def comparison(draw: Draw) -> Row:
    a, b = draw.some(range(10, 1000), 2)
    if draw.between(0, 1):
        return f"Which number is larger, {a} or {b}?", "", f"{max(a, b)} is larger than {min(a, b)}."
    first, second = draw.some(words.NAMES, 2)
    older, younger = (first, second) if a > b else (second, first)
    text = f"{first} has {a} points. {second} has {b} points."
    gap = abs(a - b)
    return "Who has more points, and by how many?", text, f"{older} has {gap} more points than {younger}."


def dates(draw: Draw) -> Row:
    start = datetime.date(draw.between(1990, 2029), draw.between(1, 12), draw.between(1, 28))
    later = draw.between(1, 40)
    end = start + datetime.timedelta(days=later)
    if draw.between(0, 1):
        count = "1 day" if later == 1 else f"{later} days"
        return f"Which date is {count} after {_day(start)}?", "", f"It is {_day(end)}."
    weekday, ahead = draw.between(0, 6), draw.between(1, 30)
    count = "1 day" if ahead == 1 else f"{ahead} days"
    answer = WEEKDAYS[(weekday + ahead) % 7]
    return f"Today is {WEEKDAYS[weekday]}. What day is it in {count}?", "", f"In {count} it is {answer}."


def clock(draw: Draw) -> Row:
    start, wait = 5 * draw.between(0, 287), 5 * draw.between(1, 40)
    end = (start + wait) % (24 * 60)
    question = f"A train leaves at {start // 60}:{start % 60:02d} and travels for {wait} minutes. When does it arrive?"
    return question, "", f"It arrives at {end // 60}:{end % 60:02d}."


def plurals(draw: Draw) -> Row:
    chosen = draw.some(words.PLURALS, draw.between(1, 4))
    ask = "Give the plural of " + _join([f'"{one}"' for one, _ in chosen]) + "."
    return ask, "", "\n".join(f"One {one}, two {many}." for one, many in chosen)


def opposites(draw: Draw) -> Row:
    pairs = [draw.some(pair, 2) for pair in draw.some(words.OPPOSITES, draw.between(1, 3))]
    ask = "What is the opposite of " + _join([f'"{word}"' for word, _ in pairs]) + "?"
    return ask, "", "\n".join(f'The opposite of "{word}" is "{other}".' for word, other in pairs)


def rhymes(draw: Draw) -> Row:
    family = draw.pick(words.RHYMES)
    word, *others = draw.some(family, draw.between(2, 4))
    count = "one word" if len(others) == 1 else f"{len(others)} words"
    verb = "rhymes" if len(others) == 1 else "rhyme"
    return f'Find {count} that {verb} with "{word}".', "", f'{_join(others).capitalize()} {verb} with "{word}".'


def capitals(draw: Draw) -> Row:
    chosen = draw.some(words.CAPITALS, draw.between(1, 3))
    ask = "Name the capital of " + _join([country for country, _ in chosen]) + "."
    return ask, "", " ".join(f"The capital of {country} is {city}." for country, city in chosen)


def completion(draw: Draw) -> Row:
    name, (job, place), friend = draw.pick(words.NAMES), draw.pick(words.JOBS), draw.pick(words.NAMES)
    begin = f"{name}, {_article(job)}, went to the {place} early. At the door stood {friend} with"
    thing = draw.pick(words.SHOP_ITEMS)
    answer = f"{begin} {_article(thing)} for {name}."
    return f'Complete the sentence with the word "{thing}".', begin, answer


def odd_one_out(draw: Draw) -> Row:
    group, other = draw.some(tuple(words.GROUPS), 2)
    stranger, members = draw.pick(words.GROUPS[other]), draw.some(words.GROUPS[group], draw.between(3, 5))
    listed = draw.some([stranger, *members], len(members) + 1)
    answer = f"{stranger.capitalize()} does not belong, because it is {_article(other)}. "
    answer += f"The others are {words.GROUP_PLURALS[group]}."
    return "Which word does not belong to the others?", ", ".join(listed), answer


def letter(draw: Draw) -> Row:
    sender, receiver = draw.some(words.NAMES, 2)
    thing, weekday, hour = draw.pick(words.SHOP_ITEMS), draw.pick(WEEKDAYS), draw.between(8, 18)
    reason = draw.pick(words.COMPLAINTS)
    ask = f"Write a short letter from {sender} to {receiver} about the {thing}. Meet on {weekday} at {hour}."
    answer = (
        f"Dear {receiver},\n\nthank you for the {thing} that you sent me. I am sorry to say that {reason}. I would "
        f"like to talk about it with you in person. Could we meet on {weekday} at {hour} o'clock? If that does not "
        f"suit you, please tell me when you have time.\n\nKind regards,\n{sender}"
    )
    return ask, "", answer


def story(draw: Draw) -> Row:
    name, friend = draw.some(words.NAMES, 2)
    (job, place), pet = draw.pick(words.JOBS), draw.pick(words.GROUPS["animal"])
    city, hobby, thing = draw.pick(words.CAPITALS)[1], draw.pick(words.HOBBIES), draw.pick(words.SHOP_ITEMS)
    scenes = [
        f"Every morning {name} walked through the streets of {city} to the {place} and greeted everyone on the way.",
        f"One day {_article(pet)} sat in front of the {place} and did not want to leave.",
        f"{name} gave the {pet} some water and asked {friend} for help.",
        f"{friend} looked for the owner of the {pet} in the whole city, but nobody knew anything.",
        f"In the evening, after an hour of {hobby}, they found {_article(thing)} with an address on it.",
        f"The address led them to an old house, where a child was very happy to see the {pet} again.",
        f"From that day on {name} and {friend} visited the {pet} every week.",
    ]
    kept = scenes[: draw.between(3, len(scenes))]
    ask = f"Write a story in {len(kept) + 1} sentences about {_article(job)} called {name} and {_article(pet)}."
    return ask, "", " ".join([f"In {city} there lived {_article(job)} called {name}.", *kept])


def day_plan(draw: Draw) -> Row:
    name, (job, place) = draw.pick(words.NAMES), draw.pick(words.JOBS)
    first, second = draw.some(words.HOBBIES, 2)
    hours = [6 + draw.between(0, 2)]
    for _ in range(6):
        hours.append(hours[-1] + draw.between(1, 2))
    parts = [
        "gets up and takes a shower",
        f"has breakfast with {_article(draw.pick(words.GROUPS['fruit']))} and some tea",
        f"goes to the {place} to work as {_article(job)}",
        f"eats {draw.pick(words.GROUPS['vegetable'])} soup for lunch",
        f"comes back home and spends an hour {first}",
        f"meets friends for {second}",
        "goes to bed and reads a book",
    ]
    lines = [f"At {hour} o'clock {name} {part}." for hour, part in zip(hours, parts, strict=True)]
    ask = f"Plan a day for {name}, {_article(job)} who gets up at {hours[0]} and likes {first} and {second}."
    return ask, "", "\n".join(lines)


def biography(draw: Draw) -> Row:
    name, (job, place), born = draw.pick(words.NAMES), draw.pick(words.JOBS), draw.between(1900, 1980)
    (country, city), hobby, age = draw.pick(words.CAPITALS), draw.pick(words.HOBBIES), draw.between(18, 40)
    notes = f"Name: {name}\nBorn: {born}\nCity: {city}\nJob: {job} since the age of {age}\nLikes: {hobby}"
    answer = (
        f"{name} was born in {born} in {city}, the capital of {country}. After school {name} learned the work of "
        f"{_article(job)} and found a place in a {place} in {born + age}, at the age of {age}. Those who know {name} "
        f"say that {name} is friendly and patient. When the {place} is closed, {name} likes {hobby}."
    )
    return "Write a short biography from the notes.", notes, answer


def recipe(draw: Draw) -> Row:
    dish, minutes, guests = draw.pick(("soup", "salad", "stew")), 5 * draw.between(2, 12), draw.between(2, 8)
    chosen = draw.some(words.GROUPS["vegetable"], draw.between(2, 4))
    steps = [f"Wash the {_join(chosen)} and cut everything into small pieces."]
    if dish == "salad":
        steps += [
            f"Put the pieces in a bowl and let them rest for {minutes} minutes.",
            "Add oil, lemon juice and salt.",
        ]
    else:
        water = "one litre" if dish == "soup" else "one cup"
        steps += ["Heat some oil in a pot and fry the pieces until they are brown."]
        steps += [f"Add {water} of water and cook everything for {minutes} minutes.", "Season with salt and pepper."]
    steps += [f"Divide the {dish} into {guests} portions and serve it with bread."]
    ask = f"How do I make a {dish} with {_join(chosen)} for {guests} people in {minutes} minutes?"
    return ask, "", "\n".join(f"{place}. {step}" for place, step in enumerate(steps, 1))


def multiplication_table(draw: Draw) -> Row:
    base, first, count = draw.between(2, 25), draw.between(1, 10), draw.between(4, 12)
    last = first + count - 1
    lines = [f"{factor} x {base} = {factor * base}" for factor in range(first, last + 1)]
    return f"Write the multiplication table of {base} from {first} to {last}.", "", "\n".join(lines)


_MAKERS: tuple[Callable[[Draw], Row], ...] = (
    *(arithmetic, word_problem, sort_numbers, sort_words, reverse, count_letters, translation, unit_conversion),
    *(classification, sentiment, sequence, reading, rewriting, list_making, comparison, dates, clock, plurals),
    *(
        opposites,
        rhymes,
        capitals,
        completion,
        odd_one_out,
        letter,
        story,
        day_plan,
        biography,
        recipe,
        multiplication_table,
    ),
)
TASKS: dict[str, Callable[[Draw], Row]] = {maker.__name__: maker for maker in _MAKERS}
