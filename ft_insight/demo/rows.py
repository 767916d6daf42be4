"""Made-up arithmetic word problems, so that a demo run needs no download.

What matters for a profiler is not the wording but the shape: real fine-tuning sets have a long right tail of
lengths, and it is this tail that makes padding, step time and memory jump about. The problems here are
therefore generated with a spread of lengths close to that of a grade-school maths set. The answers are right,
so the loss has something true to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

__all__ = ["generate_rows"]

_NAMES = (
    "Amara", "Bruno", "Chen", "Dalia", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas",
    "Kavya", "Luca", "Mira", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samir", "Tove",
    "Umar", "Vera", "Wanda", "Xavier", "Yuki", "Zeno", "Anneliese", "Bartholomew", "Konstantin", "Maryam",
)  # fmt: skip

# Scenery without numbers: it lengthens a problem but never changes its answer.
_SCENERY = (
    "It has been raining since early morning, and nobody is in a hurry.",
    "The whole family talks about it over dinner.",
    "{name} keeps a small notebook for exactly this kind of sum.",
    "{other} offers to check the result afterwards.",
    "The radio is playing in the background.",
    "{name} has never done this before, but a neighbour explained how it works.",
    "Last year things went rather differently, but that does not matter now.",
    "{other} would like to help, yet has to leave for the station.",
    "Everything has to be ready before the guests arrive in the evening.",
    "{name} likes to plan such things carefully, writing every single figure on the back of an envelope.",
)

# How many steps a problem should have. Mostly two to three, seldom six: this makes the long right tail.
_STEP_WEIGHTS = {1: 17, 2: 30, 3: 26, 4: 11, 5: 8, 6: 8}

# Sentences of scenery by number of steps: the shortest need one, as real sets have no such short rows, and
# the longest may get many, which draws the tail out.
_SCENERY_COUNTS = {1: (1,), 2: (0, 0, 1), 3: (0, 1, 1), 4: (0, 1, 1, 2), 5: (0, 1, 2, 3), 6: (0, 1, 2, 5)}


class _Story:
    """The problem so far: the sentences of the question, and the steps of its solution."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name, self.other, self.third = rng.sample(_NAMES, 3)
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.answer = 0

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def num(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def step(self, a: int, op: str, b: int, reason: str) -> int:
        """Add one line of the solution, `{}` in `reason` standing for the sum, and return its result."""
        if op == "/" and a % b:
            raise ValueError(f"{a} is not divisible by {b}")
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
        if result <= 0:
            raise ValueError(f"a story must not reach {result}")
        self.steps.append(reason.format(f"{a} {op} {b} = {result}"))
        self.answer = result
        return result


def _divisor(story: _Story, total: int, low: int, high: int) -> int | None:
    """Pick a number between low and high that divides the total, None if there is none."""
    fitting = [d for d in range(low, high + 1) if total % d == 0 and total > d]
    return story.rng.choice(fitting) if fitting else None


# Each template is a generator: it tells a piece of the story, works it out, and yields the question that
# could be asked at this point. Who drives it stops as soon as the problem has as many steps as wanted.


def _shopping(s: _Story) -> Iterator[str]:
    shop = s.pick("corner shop", "market", "bakery next door", "supermarket", "garden centre")
    goods = s.rng.sample(
        [
            "notebooks",
            "apples",
            "candles",
            "jars of honey",
            "pairs of socks",
            "tulip bulbs",
            "lemons",
            "postcards",
        ],
        3,
    )
    total = 0
    for index, item in enumerate(goods):
        count, price = s.num(2, 12), s.num(2, 9)
        lead = f"{s.name} goes to the {shop} and buys" if index == 0 else s.pick("Then come", "Next to that come")
        s.say(f"{lead} {count} {item} at {price} dollars each.")
        cost = s.step(count, "*", price, f"The {item} cost {{}} dollars.")
        if index:
            total = s.step(total, "+", cost, "Together with what was bought before, that is {} dollars.")
        else:
            total = cost
        yield f"How many dollars does {s.name} spend?"
    purse = total + s.num(3, 60)
    s.say(f"{s.name} came with {purse} dollars.")
    s.step(purse, "-", total, f"From the purse, {s.name} keeps {{}} dollars.")
    yield f"How many dollars does {s.name} have left?"


def _distance(s: _Story) -> Iterator[str]:
    vehicle, speeds = s.rng.choice([("bicycle", (12, 25)), ("motorbike", (45, 80)), ("train", (60, 140))])
    speed, hours = s.num(*speeds), s.num(2, 5)
    s.say(f"{s.name} travels by {vehicle} for {hours} hours at {speed} kilometres per hour.")
    done = s.step(speed, "*", hours, f"In {hours} hours, {s.name} covers {{}} kilometres.")
    yield f"How many kilometres does {s.name} travel?"
    walk = s.num(3, 14)
    s.say(f"After a break, {s.name} walks another {walk} kilometres along the river.")
    done = s.step(done, "+", walk, "With the walk it is {} kilometres.")
    yield f"How many kilometres does {s.name} cover in all?"
    rest = s.num(15, 90)
    s.say(f"The place where {s.other} is waiting lies {done + rest} kilometres from the start on this road.")
    left = s.step(done + rest, "-", done, "To the meeting place there remain {} kilometres.")
    yield f"How many kilometres are still to go to {s.other}?"
    minutes = s.num(2, 5)
    s.say(f"The rest is done slowly, each kilometre taking {minutes} minutes.")
    time = s.step(left, "*", minutes, "At this pace, the rest takes {} minutes.")
    yield "How many minutes does the rest of the way take?"
    pause = s.num(5, 25)
    s.say(f"On that last part there is also one pause of {pause} minutes for looking at the map.")
    s.step(time, "+", pause, "Adding the pause gives {} minutes.")
    yield "How many minutes does the last part take, with the pause?"


def _baking(s: _Story) -> Iterator[str]:
    thing = s.pick("cookies", "rolls", "muffins", "pretzels", "scones")
    trays, per = s.num(3, 9), s.rng.choice([12, 18, 24, 30])
    s.say(f"{s.name} bakes {trays} trays of {thing} with {per} {thing} on each tray.")
    total = s.step(trays, "*", per, f"The trays hold {{}} {thing}.")
    yield f"How many {thing} does {s.name} bake?"
    boxes = s.num(4, 6)
    burnt = total % boxes + boxes
    s.say(f"Sadly {burnt} of them burn and have to be thrown away.")
    total = s.step(total, "-", burnt, f"Without the burnt ones there are {{}} {thing}.")
    yield f"How many {thing} are good to eat?"
    s.say(f"The good ones are packed evenly into {boxes} boxes.")
    each = s.step(total, "/", boxes, f"Each box gets {{}} {thing}.")
    yield f"How many {thing} are in each box?"
    price = s.num(2, 4)
    s.say(f"A box is sold at {price} dollars for every one of the {thing} inside.")
    box = s.step(each, "*", price, "So one box costs {} dollars.")
    yield "How many dollars does one box cost?"
    sold = s.num(2, boxes)
    s.say(f"By noon {sold} boxes are sold at the school fair.")
    income = s.step(box, "*", sold, "The sold boxes bring in {} dollars.")
    yield "How many dollars are in the cash box at noon?"
    cost = s.num(2, income - 2)
    s.say(f"Flour, butter and sugar had cost {cost} dollars.")
    s.step(income, "-", cost, "After paying the ingredients, {} dollars remain.")
    yield "How many dollars of profit are made by noon?"


def _wages(s: _Story) -> Iterator[str]:
    job = s.pick("gardener", "lifeguard", "cook", "courier", "tutor", "cashier")
    hours, wage = s.num(3, 9), s.num(11, 28)
    s.say(f"{s.name} works as a {job} for {hours} hours a day and earns {wage} dollars an hour.")
    day = s.step(hours, "*", wage, "One day brings {} dollars.")
    yield f"How many dollars does {s.name} earn in a day?"
    days = s.num(3, 6)
    s.say(f"A working week has {days} days.")
    week = s.step(day, "*", days, "One week brings {} dollars.")
    yield f"How many dollars does {s.name} earn in a week?"
    bonus = s.num(20, 90)
    s.say(f"This week there is also a bonus of {bonus} dollars, as {s.other} is on holiday.")
    week = s.step(week, "+", bonus, "The bonus lifts this to {} dollars.")
    yield f"How many dollars does {s.name} get this week, with the bonus?"
    rent = s.num(40, week // 2)
    s.say(f"Out of this, {rent} dollars go to the landlord on Friday.")
    rest = s.step(week, "-", rent, "After the landlord is paid there are {} dollars.")
    yield "How many dollars are left after paying the landlord?"
    shoes = s.num(5, 20) * 2 + rest % 2
    s.say(f"A new pair of working shoes costs {shoes} dollars.")
    rest = s.step(rest, "-", shoes, "The shoes bring this down to {} dollars.")
    yield f"How many dollars does {s.name} have after buying the shoes?"
    s.say(f"{s.name} saves half of what remains and spends the other half.")
    s.step(rest, "/", 2, "Half of it is {} dollars.")
    yield f"How many dollars does {s.name} save?"


def _sharing(s: _Story) -> Iterator[str]:
    thing = s.pick("marbles", "stickers", "walnuts", "beads", "trading cards", "shells")
    people, each = s.num(3, 8), s.num(4, 15)
    s.say(f"{s.name} has {people * each} {thing} and shares them equally among {people} children.")
    share = s.step(people * each, "/", people, f"Every child gets {{}} {thing}.")
    yield f"How many {thing} does each child get?"
    more = s.num(3, 20)
    s.say(f"One of the children, {s.other}, already had {more} {thing} at home.")
    own = s.step(share, "+", more, f"{s.other} now has {{}} {thing}.")
    yield f"How many {thing} does {s.other} have now?"
    lost = s.num(2, min(own - 2, 9))
    s.say(f"On the way home {s.other} loses {lost} of them.")
    own = s.step(own, "-", lost, f"After the loss there are {{}} {thing}.")
    yield f"How many {thing} does {s.other} still have?"
    factor = s.num(2, 4)
    s.say(f"{s.third}, who collects them too, has {factor} times as many {thing} as {s.other} has then.")
    theirs = s.step(own, "*", factor, f"{s.third} has {{}} {thing}.")
    yield f"How many {thing} does {s.third} have?"
    s.say(f"In the end {s.other} and {s.third} put everything into one big glass.")
    glass = s.step(own, "+", theirs, f"In the glass there are {{}} {thing}.")
    yield f"How many {thing} are in the glass?"
    taken = s.num(2, min(9, glass - 2))
    s.say(f"They take {taken} {thing} out again to decorate a picture frame.")
    s.step(glass, "-", taken, f"The glass then holds {{}} {thing}.")
    yield f"How many {thing} remain in the glass?"


def _percent(s: _Story) -> Iterator[str]:
    thing = s.pick("jacket", "lamp", "bicycle", "suitcase", "guitar", "tent")
    percent, part = s.rng.choice([(10, 10), (20, 5), (25, 4), (50, 2)])
    price = part * s.num(6, 40)
    s.say(f"A {thing} costs {price} dollars, and in the sale it is {percent} percent cheaper.")
    off = s.step(price, "/", part, f"To take {percent} percent is to divide by {part}: {{}} dollars.")
    yield f"By how many dollars is the {thing} cheaper?"
    price = s.step(price, "-", off, f"In the sale the {thing} costs {{}} dollars.")
    yield f"How many dollars does the {thing} cost in the sale?"
    fee = s.num(3, 15)
    s.say(f"{s.name} has it sent home, which adds {fee} dollars for the parcel.")
    price = s.step(price, "+", fee, "With the parcel it is {} dollars.")
    yield f"How many dollars does {s.name} pay in all?"
    count = s.num(3, 5)
    s.say(f"As {count - 1} more from the hiking club want the same, the order is for {count} at this price.")
    total = s.step(price, "*", count, f"The order for {count} comes to {{}} dollars.")
    yield "How many dollars does the whole order cost?"
    gift = s.num(5, price - 1)
    s.say(f"The club pays {gift} dollars of it out of a fund which {s.other} looks after.")
    total = s.step(total, "-", gift, "Without the part from the fund, {} dollars remain to be paid.")
    yield "How many dollars remain for the members to pay?"
    if parts := _divisor(s, total, 2, 9):
        s.say(f"The members pay this in {parts} equal monthly rates.")
        s.step(total, "/", parts, "Each rate is {} dollars.")
        yield "How many dollars is one monthly rate?"


def _ages(s: _Story) -> Iterator[str]:
    age, gap = s.num(6, 15), s.num(2, 9)
    relation = s.pick("sister", "brother", "cousin", "neighbour", "friend")
    s.say(f"{s.name} is {age} years old. {s.other}, a {relation}, is {gap} years older.")
    second = s.step(age, "+", gap, f"{s.other} is {{}} years old.")
    yield f"How old is {s.other}?"
    factor = s.num(2, 4)
    s.say(f"{s.third} is {factor} times as old as {s.other}.")
    third = s.step(second, "*", factor, f"{s.third} is {{}} years old.")
    yield f"How old is {s.third}?"
    s.say("On a birthday card they write all three ages and the sum of them.")
    both = s.step(age, "+", second, f"The ages of {s.name} and {s.other} add up to {{}}.")
    total = s.step(both, "+", third, f"With {s.third} it is {{}} years.")
    yield "What is the sum of the three ages?"
    years = s.num(2, 9)
    s.say(f"They wonder what the sum will be {years} years later, when each of the 3 is {years} years older.")
    grown = s.step(3, "*", years, "By then the three together grow older by {} years.")
    s.step(total, "+", grown, f"So in {years} years the sum is {{}}.")
    yield f"What will the sum be {years} years from now?"


def _garden(s: _Story) -> Iterator[str]:
    plant = s.pick("tomato", "bean", "pepper", "strawberry", "pumpkin")
    beds, per = s.num(3, 9), 2 * s.num(3, 10)
    s.say(f"In a garden there are {beds} beds with {per} {plant} plants each.")
    plants = s.step(beds, "*", per, "The beds have {} plants.")
    yield f"How many {plant} plants are there?"
    s.say("A late frost kills half of the plants.")
    plants = s.step(plants, "/", 2, "Half of the plants survive: {} plants.")
    yield "How many plants survive the frost?"
    new = s.num(4, 25)
    s.say(f"{s.name} buys {new} young plants at the nursery to fill some of the gaps.")
    plants = s.step(plants, "+", new, "With the new ones there are {} plants.")
    yield f"How many {plant} plants are in the garden after that?"
    fruit = s.num(3, 8)
    s.say(f"In the summer every plant bears {fruit} fruits.")
    fruits = s.step(plants, "*", fruit, "The harvest is {} fruits.")
    yield "How many fruits are harvested?"
    eaten = s.num(5, min(40, fruits - 2))
    s.say(f"Before anybody can pick them, birds and snails get {eaten} of the fruits.")
    fruits = s.step(fruits, "-", eaten, "Once birds and snails had theirs, {} fruits are left.")
    yield f"How many fruits does {s.name} get to pick?"
    if crates := _divisor(s, fruits, 2, 12):
        s.say(f"They go into {crates} crates, the same number in each.")
        s.step(fruits, "/", crates, "One crate holds {} fruits.")
        yield "How many fruits are in one crate?"


def _reading(s: _Story) -> Iterator[str]:
    book = s.pick("novel", "atlas", "travel diary", "book of fairy tales", "crime story")
    days, pages = s.num(3, 10), s.num(8, 35)
    s.say(f"{s.name} reads {pages} pages of a {book} every day for {days} days.")
    read = s.step(days, "*", pages, f"In {days} days that makes {{}} pages.")
    yield f"How many pages does {s.name} read?"
    pace, more_days = s.num(10, 30), s.num(3, 9)
    s.say(f"The {book} has {read + pace * more_days} pages.")
    left = s.step(read + pace * more_days, "-", read, "There are {} pages left.")
    yield "How many pages are left to read?"
    s.say(f"From now on {s.name} wants to read {pace} pages a day.")
    rest = s.step(left, "/", pace, "The rest takes {} days.")
    yield "How many more days does it take to finish?"
    total = s.step(days, "+", rest, f"From beginning to end, {s.name} reads for {{}} days.")
    yield "How many days does the reading take from beginning to end?"
    minutes = s.num(15, 45)
    s.say(f"On every one of those days the reading takes {minutes} minutes, mostly on the tram.")
    spent = s.step(total, "*", minutes, "Altogether this takes {} minutes.")
    yield f"How many minutes does {s.name} spend on it?"
    extra = s.num(20, 90)
    s.say(f"Writing a review of it for the school paper takes {extra} minutes more.")
    s.step(spent, "+", extra, "With the review it is {} minutes.")
    yield "How many minutes go into reading and reviewing?"


def _tickets(s: _Story) -> Iterator[str]:
    place = s.pick("zoo", "theatre", "swimming pool", "museum of ships", "planetarium")
    adults, price = s.num(2, 9), s.num(8, 19)
    s.say(f"A group with {adults} adults visits the {place}, where a ticket costs {price} dollars.")
    first = s.step(adults, "*", price, "The adults pay {} dollars.")
    yield "How many dollars do the adults pay?"
    children, less = s.num(3, 14), s.num(2, 6)
    s.say(f"There are {children} children too, and a ticket for a child is {less} dollars cheaper.")
    small = s.step(price, "-", less, "A child pays {} dollars.")
    second = s.step(children, "*", small, "The children pay {} dollars.")
    yield "How many dollars do the children pay?"
    total = s.step(first, "+", second, "The whole group pays {} dollars.")
    yield "How many dollars does the whole group pay?"
    tour = s.num(15, 60)
    s.say(f"A guide called {s.other} shows them around, and the guided tour costs {tour} dollars for the group.")
    total = s.step(total, "+", tour, "The tour makes this {} dollars.")
    yield "How many dollars does the visit cost with the tour?"
    s.say(f"{s.name} collected {total + tour} dollars for the day, and gives back what is not needed.")
    s.step(total + tour, "-", total, f"{s.name} can give back {{}} dollars.")
    yield f"How many dollars does {s.name} give back?"


def _tank(s: _Story) -> Iterator[str]:
    tank = s.pick("rain barrel", "fish tank", "paddling pool", "water tower", "fountain")
    rate, minutes = s.num(4, 20), s.num(6, 30)
    s.say(f"A {tank} is filled at {rate} litres a minute for {minutes} minutes.")
    level = s.step(rate, "*", minutes, f"Into the {tank} run {{}} litres.")
    yield f"How many litres are in the {tank}?"
    cans, size = s.num(2, 4), s.num(3, 5)
    s.say(f"{s.name} then takes out {cans} cans of {size} litres each to water the roses.")
    used = s.step(cans, "*", size, "The cans hold {} litres.")
    level = s.step(level, "-", used, f"The {tank} still has {{}} litres.")
    yield f"How many litres are left in the {tank}?"
    rain = s.num(5, 40)
    s.say(f"During the night a thunderstorm adds {rain} litres.")
    level = s.step(level, "+", rain, "After the storm there are {} litres.")
    yield "How many litres are there after the storm?"
    s.say(f"It can hold {level + rate * minutes} litres before it flows over.")
    room = s.step(level + rate * minutes, "-", level, "There is room for {} litres.")
    yield "How many more litres fit in?"
    s.say(f"{s.other} turns on the tap again, which gives {rate} litres a minute as before.")
    s.step(room, "/", rate, "Until it is full it takes {} minutes.")
    yield "After how many minutes is it full?"


def _bus(s: _Story) -> Iterator[str]:
    vehicle = s.pick("bus", "tram", "ferry", "cable car", "night train")
    stops = s.rng.sample(["the town hall", "the old bridge", "the harbour", "the hospital", "the castle"], 5)
    aboard, joining = s.num(12, 40), s.num(3, 20)
    s.say(f"A {vehicle} carries {aboard} passengers. At {stops[0]}, {joining} people get on.")
    aboard = s.step(aboard, "+", joining, f"After {stops[0]}, {{}} people are aboard.")
    yield f"How many passengers are on the {vehicle} now?"
    for stop in stops[1:]:
        change = s.num(2, 12)
        if aboard > 15 and s.rng.random() < 0.5:
            s.say(f"At {stop}, {change} passengers get off.")
            aboard = s.step(aboard, "-", change, f"After {stop}, {{}} people are aboard.")
        else:
            s.say(f"At {stop}, {change} more people get on, {s.pick(s.name, s.other, s.third)} among them.")
            aboard = s.step(aboard, "+", change, f"After {stop}, {{}} people are aboard.")
        yield f"How many passengers are on the {vehicle} after {stop}?"
    fare = s.num(2, 6)
    s.say(f"The inspector now collects {fare} dollars from every person aboard.")
    s.step(aboard, "*", fare, "The inspector collects {} dollars.")
    yield "How many dollars does the inspector collect?"


def _fence(s: _Story) -> Iterator[str]:
    field = s.pick("vegetable patch", "playground", "meadow", "courtyard", "dance floor")
    width = s.num(3, 20)
    length = width + s.num(1, 15)
    s.say(f"A rectangular {field} is {length} metres long and {width} metres wide.")
    if s.rng.random() < 0.5:
        area = s.step(length, "*", width, "The area is {} square metres.")
        yield "How many square metres is its area?"
        thing, measure = "stone slabs", "square metre"
    else:
        half = s.step(length, "+", width, "One long and one short side are {} metres.")
        area = s.step(half, "*", 2, "All four sides are {} metres.")
        yield "How many metres is its perimeter?"
        thing, measure = "a wooden fence", "metre"
    price = s.num(2, 12)
    s.say(f"{s.name} asks for an offer: {thing} at {price} dollars per {measure}.")
    cost = s.step(area, "*", price, f"The price for {thing} is {{}} dollars.")
    yield f"How many dollars would {thing} cost?"
    work = s.num(50, 200)
    s.say(f"The workers, led by {s.other}, want {work} dollars on top of it for setting everything up.")
    cost = s.step(cost, "+", work, "Including the work it costs {} dollars.")
    yield "How many dollars does it cost with the work?"
    paid = s.num(10, cost // 2)
    s.say(f"Upon signing, {s.name} pays {paid} dollars in advance.")
    s.step(cost, "-", paid, "After the advance payment, {} dollars are open.")
    yield "How many dollars are to be paid at the end?"


def _saving(s: _Story) -> Iterator[str]:
    goal = s.pick("telescope", "trip to the sea", "drum kit", "camera", "sewing machine")
    start, weekly, weeks = s.num(10, 60), s.num(4, 18), s.num(5, 20)
    s.say(f"{s.name} is saving for a {goal} and puts aside {weekly} dollars a week for {weeks} weeks.")
    saved = s.step(weekly, "*", weeks, f"In {weeks} weeks that is {{}} dollars.")
    yield f"How many dollars does {s.name} save?"
    s.say(f"There were {start} dollars in the jar to begin with.")
    saved = s.step(saved, "+", start, "With the money from before, the jar has {} dollars.")
    yield "How many dollars are in the jar now?"
    missing = weekly * 2 * s.num(2, 8)
    s.say(f"The {goal} costs {saved + missing} dollars.")
    missing = s.step(saved + missing, "-", saved, "What is missing is {} dollars.")
    yield "How many dollars are still missing?"
    s.say(f"{s.other} promises to pay half of the missing sum.")
    missing = s.step(missing, "/", 2, f"{s.name} has to find {{}} dollars alone.")
    yield f"How many dollars does {s.name} still have to save alone?"
    s.say("The saving goes on at the same pace each week.")
    wait = s.step(missing, "/", weekly, "At this pace it takes another {} weeks.")
    yield "How many more weeks does it take?"
    s.step(weeks, "+", wait, "From the first week on it has then been {} weeks.")
    yield f"How many weeks does {s.name} save in total?"


_Template = Callable[[_Story], Iterator[str]]
_TEMPLATES: tuple[_Template, ...] = (
    _shopping,
    _distance,
    _baking,
    _wages,
    _sharing,
    _percent,
    _ages,
    _garden,
    _reading,
    _tickets,
    _tank,
    _bus,
    _fence,
    _saving,
)


def _one_row(rng: random.Random) -> dict[str, str]:
    """Tell one story up to a drawn number of steps, with some scenery in between."""
    story = _Story(rng)
    wanted = rng.choices(list(_STEP_WEIGHTS), weights=list(_STEP_WEIGHTS.values()))[0]
    question = ""
    for asked in rng.choice(_TEMPLATES)(story):
        question = asked
        if len(story.steps) >= wanted:
            break
    for sentence in rng.sample(_SCENERY, rng.choice(_SCENERY_COUNTS[wanted])):
        place = rng.randint(1, len(story.sentences))
        story.sentences.insert(place, sentence.format(name=story.name, other=story.other))
    prompt = " ".join([*story.sentences, question])
    completion = "\n".join([*story.steps, f"#### {story.answer}"])
    return {"prompt": prompt, "completion": completion}


def generate_rows(n: int = 400, seed: int = 0) -> list[dict[str, str]]:
    """Make `n` different prompt/completion rows, the same ones for the same seed on every machine.

    The first rows do not depend on `n`, so a shorter demo sees the start of a longer one.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    while len(rows) < n:
        row = _one_row(rng)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            rows.append(row)
    return rows
