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
# frequent English words that the tasks do not use, so that the tokenizer serves other instruction sets too
COMMON = _split(
    "the of and to in is that it for on was with as be by this have from or are at which not but an had they you were "
    "her all she there would their we him been has when who will no more if out so said what up its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many before must through years much where your way well down should because long each "
    "just state those people too good very make world still own see men work here get both between life being under "
    "three never know last another us back great old year off come since against go came right used take use place "
    "small home during without however part again found general set though open less house water public almost far "
    "later around system number possible important different information example following include provide data "
    "computer internet software technology science research health food energy environment natural climate change "
    "product service business company market customer sales money price cost value team project manager develop "
    "design create process method model result solution problem question answer sentence paragraph article story poem "
    "character describe explain identify summarize generate compare classify rewrite edit suggest list write give "
    "name find calculate determine convert translate convey express feeling happy love friend family children student "
    "teacher learn learning education school university language english word words text document email message "
    "letter social media user users online website web page video music movie book history country government society "
    "culture community human person individual woman body brain heart exercise sleep stress diet healthy weight plant "
    "animal species tree forest ocean earth sun light air temperature power electric vehicle car travel city street "
    "building room space color colour red blue green black white large big high low short deep strong clear simple "
    "easy difficult hard quick fast slow able available common popular local global national international political "
    "economic financial personal special specific various several certain main major key best better higher increase "
    "decrease reduce improve help support allow enable require need want ensure maintain protect prevent avoid "
    "consider choose decide think believe understand remember feel look seem become remain keep start begin stop "
    "continue end finish complete achieve reach success successful goal opportunity challenge risk benefit advantage "
    "effect impact cause reason purpose function role skill ability experience knowledge practice training "
    "performance quality level rate amount percent total average per day week month hour minute second today tomorrow "
    "yesterday always often sometimes usually every once twice together alone within among across along toward "
    "towards above below behind near next until while whether either neither rather quite perhaps maybe likely "
    "probably certainly finally instead therefore thus hence moreover furthermore additionally overall known based "
    "using making including according due related similar same whole full half rest left front side top bottom middle "
    "center inside outside form shape size type kind group member order case point line term section step idea "
    "concept theory fact evidence study analysis report review test measure score figure table chart image picture "
    "art style sound voice song dance game play player sport ball win lose race run walk drive fly move turn stand "
    "sit hold carry bring send receive pay buy sell spend save invest account bank credit tax law legal rule policy "
    "president party vote war peace security safety police crime court judge attack military force control machine "
    "tool engine device phone screen app application program code algorithm network digital artificial intelligence "
    "neural input output variable string array return true false class object loop integer sum equation square circle "
    "triangle angle area length width height volume mass speed distance pressure heat cold hot warm cool wind rain "
    "snow storm season spring summer autumn winter morning evening night meal breakfast lunch dinner recipe cook bake "
    "mix add stir minutes cup sugar salt pepper oil butter cheese meat chicken fish rice bread fruit vegetable apple "
    "orange lemon tea coffee drink glass bottle doctor patient hospital medical treatment disease symptoms medicine "
    "drug virus cancer blood skin eye hand head foot face hair mind soul spirit dream hope fear anger joy sad "
    "beautiful wonderful amazing perfect essential necessary effective efficient creative innovative unique "
    "traditional modern recent current future past present ancient early late "
)
