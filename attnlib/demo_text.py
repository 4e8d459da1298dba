"""The text that the demo reads: eight subjects, three passages each, from one line to a paragraph."""

from __future__ import annotations

PASSAGES: tuple[tuple[str, str], ...] = (
    ("bread", "A sourdough starter is only flour and water, left alone until wild yeast moves in."),
    (
        "bread",
        "Knead the dough until it stretches without tearing, let it rise in a warm corner of the kitchen, and bake it "
        "on a stone that has been in the oven for an hour. The crust should crackle when it meets the cold air; that "
        "sound is the loaf shrinking faster inside than out. Resist cutting it while it is hot.",
    ),
    ("bread", "Rye flour has little gluten, so the loaf stays dense and keeps for a week."),
    ("glacier", "Meltwater runs beneath the glacier and comes out milky with ground rock."),
    (
        "glacier",
        "When more snow falls in winter than melts in summer, it is pressed into ice, and the ice begins to flow "
        "downhill under its own weight. A metre a day is fast. Stones frozen into the bottom scratch long parallel "
        "lines into the bedrock, from which one can still read, ten thousand years later, which way the ice moved.",
    ),
    ("glacier", "The valley is broad and round at the bottom because ice carved it, not a river."),
    (
        "bicycle",
        "A bicycle stays upright because the rider keeps steering the wheels back under the falling frame, mostly "
        "without noticing. Lock the handlebar and nobody can ride it for more than a few seconds.",
    ),
    ("bicycle", "The chain skips under load: the cassette is worn and the teeth look like shark fins."),
    ("bicycle", "Lower the saddle a little and your knees will thank you on the long climb to the pass."),
    ("orchestra", "The oboe gives the A, and the strings tune to it one desk after the other."),
    (
        "orchestra",
        "From the fourth row of the second violins one hears mostly violas and one's own breathing. The melody, which "
        "the audience takes home, arrives as a rumour from the other side of the stage. What holds eighty people "
        "together is less the baton than the habit of listening, and the courage to enter softly in the right place.",
    ),
    ("orchestra", "She conducted the slow movement without a score, and the hall forgot to cough."),
    ("compiler", "The parser turns the text of a program into a tree; everything after that works on the tree."),
    (
        "compiler",
        "Register allocation is colouring a graph in which two values are joined when both are alive at once. There "
        "are never enough colours, so some values are spilled to memory, and the art lies in choosing those that are "
        "not needed in the inner loop. Nearly every pass before it makes the problem either easier or much harder.",
    ),
    ("compiler", "Inlining the small function let the optimiser see that the branch was never taken."),
    ("bees", "In June the colony splits, and half of the bees leave with the old queen."),
    (
        "bees",
        "A forager that has found lime trees in bloom dances on the comb when she returns: the angle to the vertical "
        "is the angle to the sun, and the length of the waggle is the distance. The others cannot see her in the dark "
        "hive; they read the dance with their feelers and fly out to a place where they have never been.",
    ),
    ("bees", "The beekeeper lifts out a frame, heavy with honey and sealed with white wax."),
    ("court", "The tenant has four weeks to object to the notice, counted from the day it was delivered."),
    (
        "court",
        "The judge found that the contract had been formed by conduct: the goods were delivered every month, the "
        "invoices were paid, and neither side had ever asked for a signature. A party that behaves for three years as "
        "if it were bound cannot be heard to say, when the price has moved against it, that it never was.",
    ),
    ("court", "The appeal was dismissed, and the landlord was ordered to pay the costs of both hearings."),
    ("tides", "Twice a day the sea leaves the mudflats, and twice a day it takes them back."),
    (
        "tides",
        "High water comes some fifty minutes later each day, because the moon has moved on while the earth turned. At "
        "full and new moon the sun pulls along the same line and the range is greatest; a week later the two are at "
        "right angles and the harbour hardly empties. The shape of the coast does the rest.",
    ),
    ("tides", "The ferry waits for the flood; with the ebb there is not enough water over the bar."),
)
