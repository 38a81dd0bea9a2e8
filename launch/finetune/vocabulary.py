"""The tables behind the embedded instruction set (``instructions.py``): words and their relations, nothing random."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Victor "
    "Wendy Yusuf Zoe Amir Bella Carlos Diana Elena Farid Hanna"
)
SHOP_ITEMS = _split("lamp chair bicycle camera kettle jacket radio suitcase blanket clock table watch guitar tent")
HOBBIES = ("playing chess", "painting", "swimming", "reading novels", "cooking", "dancing", "gardening", "singing")
TIMES = ("every day", "on Monday", "in the morning", "after lunch", "at night", "with a friend", "before work")
JOBS = (
    ("baker", "bakery"),
    ("teacher", "school"),
    ("doctor", "hospital"),
    ("farmer", "village"),
    ("pilot", "hangar"),
    ("nurse", "clinic"),
    ("cook", "restaurant"),
    ("judge", "court"),
    ("actor", "theatre"),
    ("librarian", "library"),
    ("mechanic", "garage"),
    ("chemist", "laboratory"),
)
# present, past, object
VERBS = (
    ("reads", "read", "book"),
    ("writes", "wrote", "letter"),
    ("opens", "opened", "window"),
    ("cleans", "cleaned", "kitchen"),
    ("sings", "sang", "song"),
    ("drinks", "drank", "tea"),
    ("eats", "ate", "soup"),
    ("sells", "sold", "car"),
    ("buys", "bought", "bread"),
    ("draws", "drew", "picture"),
    ("finds", "found", "key"),
    ("drives", "drove", "bus"),
    ("paints", "painted", "fence"),
    ("teaches", "taught", "lesson"),
    ("breaks", "broke", "glass"),
    ("carries", "carried", "bag"),
)
PRAISE = (
    "it works very well",
    "the colour is beautiful",
    "it was easy to use",
    "the price was fair",
    "it arrived a day early",
    "the quality is excellent",
    "the whole family loves it",
)
COMPLAINTS = (
    "it broke after two days",
    "the colour is wrong",
    "it was hard to use",
    "the price was too high",
    "it arrived a week late",
    "the quality is poor",
    "one part was missing",
)
GROUPS = {
    "fruit": _split("apple banana pear cherry mango plum lemon peach grape melon"),
    "animal": _split("dog cat horse rabbit goat hamster parrot duck turtle owl"),
    "vegetable": _split("carrot onion spinach cabbage potato broccoli leek radish celery garlic"),
    "vehicle": _split("car bus train tram truck boat bicycle helicopter ferry tractor"),
    "tool": _split("hammer saw drill wrench screwdriver shovel rake axe chisel ladder"),
    "instrument": _split("violin piano flute trumpet drum guitar harp cello clarinet organ"),
    "garment": _split("shirt coat scarf hat glove sock skirt sweater jacket belt"),
    "colour": _split("red blue green yellow purple brown black white pink grey"),
}
GROUP_PLURALS = {
    "fruit": "fruits",
    "animal": "animals",
    "vegetable": "vegetables",
    "vehicle": "vehicles",
    "tool": "tools",
    "instrument": "instruments",
    "garment": "garments",
    "colour": "colours",
}
# one large unit, many large units, small unit, small units in a large one
UNITS = (
    ("kilometre", "kilometres", "metres", 1000),
    ("metre", "metres", "centimetres", 100),
    ("centimetre", "centimetres", "millimetres", 10),
    ("kilogram", "kilograms", "grams", 1000),
    ("litre", "litres", "millilitres", 1000),
    ("hour", "hours", "minutes", 60),
    ("minute", "minutes", "seconds", 60),
    ("day", "days", "hours", 24),
    ("week", "weeks", "days", 7),
    ("year", "years", "months", 12),
    ("dozen", "dozens", "pieces", 12),
    ("foot", "feet", "inches", 12),
    ("yard", "yards", "feet", 3),
)
PLURALS = (
    *(("apple", "apples"), ("book", "books"), ("box", "boxes"), ("child", "children"), ("city", "cities")),
    *(("coin", "coins"), ("dish", "dishes"), ("foot", "feet"), ("goose", "geese"), ("key", "keys")),
    *(("knife", "knives"), ("leaf", "leaves"), ("man", "men"), ("mouse", "mice"), ("pencil", "pencils")),
    *(("sheep", "sheep"), ("story", "stories"), ("tomato", "tomatoes"), ("tooth", "teeth"), ("wolf", "wolves")),
    *(("woman", "women"), ("stamp", "stamps"), ("glass", "glasses"), ("baby", "babies"), ("shelf", "shelves")),
)
COUNTED = ("apples", "books", "boxes", "coins", "dishes", "keys", "pencils", "stamps", "glasses", "tomatoes")
OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("old", "new"), ("hard", "soft")),
    *(("early", "late"), ("rich", "poor"), ("light", "dark"), ("wet", "dry"), ("full", "empty"), ("loud", "quiet")),
    *(("open", "closed"), ("happy", "sad"), ("strong", "weak"), ("near", "far"), ("up", "down"), ("first", "last")),
    *(("long", "short"), ("wide", "narrow"), ("clean", "dirty"), ("deep", "shallow"), ("cheap", "expensive")),
    *(("brave", "afraid"), ("true", "false"), ("safe", "dangerous"), ("sharp", "blunt"), ("win", "lose")),
)
RHYMES = (
    _split("cat hat bat mat rat flat"),
    _split("light night right sight bright fight"),
    _split("day way play stay grey tray"),
    _split("tree free bee see key three"),
    _split("rain train plane chain brain lane"),
    _split("moon spoon soon noon tune"),
    _split("bell tell well shell sell smell"),
    _split("king ring sing bring thing wing"),
    _split("book look cook hook took"),
    _split("snow go show blow toe low"),
    _split("ball fall call wall tall small"),
)
CAPITALS = (
    *(("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Austria", "Vienna")),
    *(("Poland", "Warsaw"), ("Greece", "Athens"), ("Norway", "Oslo"), ("Sweden", "Stockholm"), ("Finland", "Helsinki")),
    *(("Denmark", "Copenhagen"), ("Portugal", "Lisbon"), ("Ireland", "Dublin"), ("Hungary", "Budapest")),
    *(("Japan", "Tokyo"), ("China", "Beijing"), ("India", "New Delhi"), ("Egypt", "Cairo"), ("Kenya", "Nairobi")),
    *(("Peru", "Lima"), ("Cuba", "Havana"), ("Canada", "Ottawa"), ("Brazil", "Brasilia"), ("Turkey", "Ankara")),
)
# English, French, Spanish, German
TRANSLATIONS = (
    *(("cat", "chat", "gato", "Katze"), ("dog", "chien", "perro", "Hund")),
    *(("house", "maison", "casa", "Haus"), ("book", "livre", "libro", "Buch")),
    *(("water", "eau", "agua", "Wasser"), ("bread", "pain", "pan", "Brot")),
    *(("milk", "lait", "leche", "Milch"), ("apple", "pomme", "manzana", "Apfel")),
    *(("tree", "arbre", "árbol", "Baum"), ("sun", "soleil", "sol", "Sonne")),
    *(("moon", "lune", "luna", "Mond"), ("sea", "mer", "mar", "Meer")),
    *(("mountain", "montagne", "montaña", "Berg"), ("river", "rivière", "río", "Fluss")),
    *(("hand", "main", "mano", "Hand"), ("head", "tête", "cabeza", "Kopf")),
    *(("heart", "cœur", "corazón", "Herz"), ("friend", "ami", "amigo", "Freund")),
    *(("mother", "mère", "madre", "Mutter"), ("father", "père", "padre", "Vater")),
    *(("child", "enfant", "niño", "Kind"), ("school", "école", "escuela", "Schule")),
    *(("street", "rue", "calle", "Straße"), ("city", "ville", "ciudad", "Stadt")),
    *(("door", "porte", "puerta", "Tür"), ("window", "fenêtre", "ventana", "Fenster")),
    *(("table", "table", "mesa", "Tisch"), ("chair", "chaise", "silla", "Stuhl")),
    *(("red", "rouge", "rojo", "rot"), ("blue", "bleu", "azul", "blau")),
    *(("green", "vert", "verde", "grün"), ("white", "blanc", "blanco", "weiß")),
    *(("black", "noir", "negro", "schwarz"), ("night", "nuit", "noche", "Nacht")),
    *(("day", "jour", "día", "Tag"), ("winter", "hiver", "invierno", "Winter")),
    *(("summer", "été", "verano", "Sommer"), ("bird", "oiseau", "pájaro", "Vogel")),
    *(("horse", "cheval", "caballo", "Pferd"), ("garden", "jardin", "jardín", "Garten")),
    *(("letter", "lettre", "carta", "Brief"), ("bridge", "pont", "puente", "Brücke")),
)
