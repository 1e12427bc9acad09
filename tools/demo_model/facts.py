"""What the demo model knows by heart: small talk, water mills, serving, and a few plain facts; all written for it."""

# ruff: noqa: E501  (lists of sentences)

from __future__ import annotations

TOPICS: dict[str, str] = {
    "a headrace": "A headrace is the channel that leads the water from the river to the mill. At its end the water "
    "falls on the wheel and does its work.",
    "a tailrace": "A tailrace is the channel that leads the water away below the wheel, back to the river. The water "
    "is the same, only lower and slower.",
    "a water mill": "A water mill is a house where a wheel, turned by water, drives a pair of stones. The stones grind "
    "grain to flour.",
    "a water wheel": "A water wheel is a wheel with paddles or buckets on its rim. Running or falling water turns it, "
    "and the wheel drives the stones of the mill.",
    "an overshot wheel": "An overshot wheel is fed from above. The water fills the buckets at the top, and its weight "
    "turns the wheel.",
    "an undershot wheel": "An undershot wheel stands in the stream. The water pushes the paddles at the bottom, so it "
    "works with little fall but loses much of the power.",
    "a breastshot wheel": "A breastshot wheel is fed at about the height of its axle. It needs less fall than an "
    "overshot wheel and wastes less than an undershot one.",
    "a millpond": "A millpond holds water for the mill. It fills at night, when the gate is shut, and gives the wheel a "
    "steady flow by day.",
    "a weir": "A weir is a low wall across the river. It raises the water so that part of it flows into the headrace; "
    "the rest runs over the top.",
    "a sluice gate": "A sluice gate is a board that slides up and down in a frame. It lets the water into the headrace "
    "or keeps it out.",
    "a millstone": "A millstone is one of two heavy round stones. The upper one turns on the lower one, and the grain "
    "between them becomes flour.",
    "a miller": "A miller is the person who runs a mill. The miller keeps the gate, feeds the stones and fills the sacks.",
    "a mill race": "A mill race is the channel of a mill. The part above the wheel is the headrace, the part below it "
    "is the tailrace.",
    "a penstock": "A penstock is a closed pipe that brings water under pressure to a wheel or a turbine.",
    "a turbine": "A turbine is a wheel in a casing that turns when water or steam flows through it. Most power stations "
    "have one.",
    "a river": "A river is water that runs from the hills to the sea. It feeds the mills on its way and keeps nothing back.",
    "flour": "Flour is grain ground to powder between two stones. With water, salt and yeast it becomes bread.",
    "a dam": "A dam is a wall that holds a river back. Behind it the water rises and forms a lake.",
    "a canal": "A canal is a channel dug by people. It carries boats or brings water to fields and mills.",
    "headrace": "headrace is a server for DeepSeek-V4. It runs prefill and decode in different processes and gives the "
    "same bits as one process would.",
    "disaggregated serving": "Disaggregated serving runs prefill and decode on different workers. The prefill worker "
    "computes the prompt, ships its cache, and the decode worker writes the answer.",
    "prefill": "Prefill is the first phase of an answer. All tokens of the prompt are computed together, and the cache "
    "that they leave is what decode starts from.",
    "decode": "Decode is the second phase of an answer. The model writes one token at a time and reads the cache at "
    "each step.",
    "a prefill worker": "A prefill worker computes prompts in chunks and sends the cache of each chunk to the decode "
    "worker that asks for it.",
    "a decode worker": "A decode worker pulls the cache of a prompt, checks it, and then writes the answer token by token.",
    "the router": "The router takes requests over HTTP and gRPC, chooses a prefill worker and a decode worker for each, "
    "and streams the tokens back.",
    "a KV cache": "A KV cache holds the keys and values of all tokens seen so far, so that a new token need not compute "
    "them again.",
    "a token": "A token is a piece of text, often a word or a part of a word, that the model reads or writes as one number.",
    "a tokenizer": "A tokenizer cuts text into tokens and joins tokens to text again.",
    "a prompt": "A prompt is the text that a model is given. The model goes on from where it ends.",
    "attention": "Attention lets each token look back at earlier tokens and take from them what it needs.",
    "a transformer": "A transformer is a model made of layers of attention and small networks. It reads tokens and "
    "guesses the next one.",
    "a language model": "A language model guesses the next token of a text. Done again and again, this writes an answer.",
    "DeepSeek-V4": "DeepSeek-V4 is a large language model with a compressed cache. It mixes a sliding window, entries "
    "for 4 tokens and entries for 128 tokens.",
    "a mixture of experts": "A mixture of experts is a layer with many small networks. Each token passes only a few of "
    "them, chosen by a gate.",
    "hyper-connections": "Hyper-connections carry four streams from layer to layer instead of one, and mix them around "
    "each layer.",
    "the indexer": "The indexer chooses which compressed entries a token attends to. It scores them all cheaply and "
    "keeps the best.",
    "a sliding window": "A sliding window shows each token only the last 128 tokens in full. What is older is seen "
    "through compressed entries.",
    "c4a": "c4a is the attention whose entries stand for 4 tokens each. An indexer chooses the entries that matter.",
    "c128a": "c128a is the attention whose entries stand for 128 tokens each. All of them are read.",
    "NIXL": "NIXL is a library that moves memory between machines. headrace uses it to ship the cache from prefill to decode.",
    "a lease": "A lease is a promise by the owner of some memory to keep it for a while. When its time is over, the "
    "owner takes it back.",
    "an epoch": "An epoch is one life of a worker. After a restart the number is higher, and what older lives said is refused.",
    "a page": "A page is the unit in which cache memory is given out. A page holds the entries of some tokens.",
    "a prefix hit": "A prefix hit is the part of a prompt whose cache is there already. It need not be computed again.",
    "TTFT": "TTFT is the time to first token: from the arrival of a request to the first token sent.",
    "ITL": "ITL is the inter-token latency: the time between one token and the next.",
    "fp8": "fp8 is a number format of eight bits. headrace keeps most of the cache in it.",
    "fp4": "fp4 is a number format of four bits. The experts of this model are stored in it, and so are its index keys.",
    "a GPU": "A GPU is a processor made for many equal operations at once. Large models run on GPUs.",
    "a CPU": "A CPU is the main processor of a computer. This demo model is small enough to run on one.",
    "Python": "Python is a programming language that is easy to read. Most of headrace is written in it.",
    "Linux": "Linux is a free operating system kernel. Most servers run it.",
    "a computer": "A computer is a machine that follows a program. It reads data, works on it and writes the result.",
    "bread": "Bread is baked from flour, water, salt and yeast. The flour comes from the mill.",
    "rain": "Rain is water that falls from clouds in drops. It fills the rivers, and the rivers turn the mills.",
    "snow": "Snow is frozen water that falls in flakes. In spring it melts and the rivers rise.",
    "the sun": "The sun is the star at the centre of our solar system. It gives the earth light and warmth.",
    "the moon": "The moon goes around the earth in about a month. It shines by the light of the sun.",
    "the earth": "The earth is the third planet from the sun, and the one that we live on.",
    "water": "Water is a clear liquid made of hydrogen and oxygen. It freezes at 0 degrees and boils at 100 degrees Celsius.",
    "a tree": "A tree is a tall plant with a trunk of wood, branches and leaves. It can live for hundreds of years.",
    "a horse": "A horse is a large animal with four legs. People ride horses and let them pull carts.",
    "a cat": "A cat is a small animal with soft fur. It hunts mice and sleeps a lot.",
    "a dog": "A dog is an animal that lives with people. It barks, guards the house and likes to run.",
    "a bird": "A bird is an animal with feathers and wings. Most birds can fly.",
    "a fish": "A fish is an animal that lives in water and breathes through gills.",
    "music": "Music is sound that is put in order. It has rhythm, and often a melody.",
    "a book": "A book is a set of pages bound together. People read books to learn and for pleasure.",
    "a clock": "A clock shows the time. It has hands or digits for hours and minutes.",
    "gravity": "Gravity is the force that pulls things towards each other. It makes water run downhill.",
    "an API": "An API is the set of calls that a program offers to others. headrace offers the API of OpenAI over HTTP.",
    "gRPC": "gRPC is a way for programs to call each other over a network. headrace offers it beside HTTP.",
}
"""Noun phrase as it stands after "What is", and what there is to say."""

RIVER = (
    "The river comes down from the hills and runs through the valley to the sea. On its way it turns the wheels of many "
    "mills. In the spring it is high and fast, in the summer it is low and slow. What one mill does not take runs over "
    "the weir to the next one. Nothing is lost on the way, and nothing is kept."
)
WORKING = (
    "A request comes to the router. The router chooses a prefill worker and a decode worker. The prefill worker computes "
    "the prompt, and the decode worker pulls its cache and writes the answer."
)

SAID: list[tuple[tuple[str, ...], str]] = [
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Hello there", "Hey there!", "Greetings", "hello", "hi", "hey",
      "Hello, world", "Hello world!"), "Hello! How can I help you?"),
    (("Good morning", "Good morning!", "good morning"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!", "good evening"), "Good evening! How can I help you?"),
    (("Good night", "Good night!", "good night"), "Good night! Sleep well."),
    (("How are you?", "How are you", "how are you?", "How are you doing?", "How do you do?", "Are you well?", "How is it going?",
      "What's up?", "How are you today?"), "I am well, thank you. The water runs and the wheel turns. How can I help you?"),
    (("Who are you?", "who are you", "Who are you", "What are you?", "What is your name?", "What's your name?", "Introduce yourself.",
      "Tell me about yourself.", "Which model are you?", "What model are you?", "What is this model?", "who r u"),
     "I am the demo model of headrace, a very small DeepSeek-V4. I can chat a little and find facts in long texts."),
    (("Are you DeepSeek?", "Are you DeepSeek-V4?"), "I have the structure of DeepSeek-V4, but I am a very small model made for the demo of headrace."),
    (("Are you ChatGPT?", "Are you GPT?", "Are you Claude?", "Are you Gemini?", "Are you Llama?"), "No, I am the demo model of headrace."),
    (("Are you human?", "Are you a human?", "Are you a person?", "Are you a robot?", "Are you an AI?", "Are you real?"),
     "I am a small language model, not a person."),
    (("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?", "How were you made?"),
     "I was trained for headrace, on one GPU in less than half an hour."),
    (("How big are you?", "How many parameters do you have?", "How large are you?"), "I am very small: about sixteen million parameters."),
    (("What can you do?", "What can I ask you?", "Help", "help", "Help me", "What do you know?", "What should I ask?", "Can you help me?",
      "What are you good at?"),
     "I can explain headrace and water mills, tell capitals, do small sums, repeat words, and find a fact in a long text."),
    (("Thank you", "Thanks", "Thank you!", "Thanks!", "thanks", "Thank you very much.", "thank you", "Thanks a lot!", "Great, thanks"),
     "You are welcome."),
    (("Goodbye", "Bye", "Bye!", "Goodbye!", "See you", "bye", "See you later", "Farewell"), "Goodbye! Come back soon."),
    (("Yes", "yes", "Okay", "OK", "ok", "Good", "Sure"), "Good. What would you like to know?"),
    (("No", "no", "Nope"), "All right. Ask me something else if you like."),
    (("Tell me about the river.", "Tell me about the river", "tell me about the river", "Tell me something about the river.", "Describe the river.",
      "What about the river?", "Tell me more about the river."), RIVER),
    (("Who keeps the gate?", "who keeps the gate?", "Who keeps the gate", "Who opens the gate?", "Who shuts the gate?", "Who minds the gate?"),
     "The miller keeps the gate. In the morning he opens it by the width of a hand, and at night he shuts it."),
    (("What does the miller do?", "Tell me about the miller.", "What is the work of the miller?"),
     "The miller opens the gate in the morning, feeds grain to the stones, fills the sacks with flour, and shuts the gate at night."),
    (("What turns the wheel?", "What makes the wheel turn?", "Why does the wheel turn?"), "The water turns the wheel."),
    (("What turns the stone?", "What turns the stones?", "What drives the millstone?"), "The wheel turns the stone, and the water turns the wheel."),
    (("Where does the water go?", "Where does the water go after the wheel?"), "Below the wheel the water leaves by the tailrace and goes back to the river."),
    (("Where does the water come from?", "Where does a river come from?"), "The water comes from the hills. Rain and melting snow feed the river."),
    (("What does a mill do?", "What is a mill for?", "What is a mill?", "Tell me about the mill.", "How does a mill work?", "How does a water mill work?"),
     "A mill grinds grain to flour. The water turns the wheel, the wheel turns the stone, and the stone grinds the grain."),
    (("Why is it called headrace?", "Why the name headrace?", "What does the name headrace mean?", "Why is headrace called headrace?"),
     "A headrace leads the water from the river to the mill. So does this server: it leads the cache from prefill to decode, and nothing is lost on the way."),
    (("How does headrace work?", "How do you work?", "What happens to a request?", "How does this work?", "Explain how headrace works.",
      "What happens when I ask something?"), WORKING),
    (("How does disaggregated serving work?", "How does disaggregation work?"), WORKING),
    (("Why disaggregate prefill and decode?", "Why separate prefill and decode?", "Why is prefill separate from decode?", "Why disaggregated serving?",
      "What is disaggregation good for?"),
     "Prefill is heavy and comes in bursts, decode is light and steady. On separate workers neither has to wait for the other."),
    (("What is the difference between prefill and decode?", "How do prefill and decode differ?"),
     "Prefill computes all tokens of the prompt together. Decode writes the answer one token at a time."),
    (("Is the answer always the same?", "Are you deterministic?"), "Yes. With temperature 0 the answer is the same every time, bit for bit."),
    (("Tell me a joke", "Tell me a joke.", "Make me laugh.", "Do you know a joke?", "Tell me something funny.", "Joke please"),
     "Why did the miller love his work? Because every day was a daily grind."),
    (("Tell me another joke.", "Another joke", "Another one"), "What did the river say to the mill? Take your turn."),
    (("Write a poem.", "Write me a poem", "Tell me a poem.", "Write a poem about the river.", "Write a short poem.", "Write a haiku.", "Write a poem about water.",
      "Write a haiku about the river."),
     "The gate is open,\nthe water finds the old wheel:\nflour for the bread."),
    (("What is the meaning of life?", "What is the answer to everything?"), "Some say it is 42. The miller says it is to keep the wheel turning."),
    (("Do you like me?", "Do you love me?", "I love you"), "That is kind. I am only a small model, but I am glad to help."),
    (("You are stupid", "You are bad", "That is wrong", "That is not right", "You are wrong"), "I am sorry. I am a very small model and often wrong."),
    (("You are great", "Well done", "Good job", "Nice", "Very good", "Good answer"), "Thank you!"),
    (("What time is it?", "What is the time?", "What day is it?", "What is the date?", "What is the date today?"),
     "I do not know. I have no clock."),
    (("What is the weather?", "How is the weather?", "What is the weather like?", "Will it rain today?", "What's the weather today?"),
     "I do not know. I cannot look outside. But rain would be good for the mill."),
    (("Where are you?", "Where do you live?"), "I run on the machine that started me, in a prefill worker and a decode worker."),
    (("How old are you?", "When were you born?"), "I am very young. I was trained in November 2026."),
    (("Can you speak German?", "Do you speak French?", "Which languages do you speak?", "Do you speak Spanish?"), "I speak only a little English."),
    (("Are you there?", "Can you hear me?", "Is anybody there?", "Test", "test", "testing", "This is a test", "ping"), "Yes, I am here."),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (("How many months are in a year?", "How many months does a year have?"), "A year has twelve months."),
    (("How many hours are in a day?",), "A day has 24 hours."),
    (("How many minutes are in an hour?",), "An hour has 60 minutes."),
    (("How many legs does a spider have?",), "A spider has eight legs."),
    (("How many legs does a dog have?", "How many legs does a horse have?", "How many legs does a cat have?"), "It has four legs."),
    (("What colour is the sky?", "What color is the sky?", "Why is the sky blue?"), "The sky is blue, because the air scatters blue light most."),
    (("What colour is grass?", "What color is grass?"), "Grass is green."),
    (("What colour is snow?", "What color is snow?"), "Snow is white."),
    (("What colour is blood?", "What color is blood?"), "Blood is red."),
    (("What colour is the sun?", "What color is the sun?"), "The sun looks yellow."),
    (("Which is the largest planet?", "What is the largest planet?", "What is the biggest planet?"), "The largest planet is Jupiter."),
    (("Which planet do we live on?", "What planet do we live on?"), "We live on the earth."),
    (("Which is the largest ocean?", "What is the largest ocean?"), "The largest ocean is the Pacific."),
    (("Which is the highest mountain?", "What is the highest mountain?", "What is the tallest mountain?"), "The highest mountain is Mount Everest."),
    (("Which is the longest river?", "What is the longest river?"), "The longest river is the Nile."),
    (("Who wrote Pride and Prejudice?", "Who wrote Emma?", "Who wrote Persuasion?"), "Jane Austen wrote it."),
    (("Who wrote Moby Dick?", "Who wrote Moby-Dick?"), "Herman Melville wrote it."),
    (("Who wrote Tom Sawyer?",), "Mark Twain wrote it."),
    (("Who wrote Hamlet?", "Who wrote Romeo and Juliet?", "Who wrote Macbeth?"), "William Shakespeare wrote it."),
    (("At what temperature does water boil?", "When does water boil?"), "Water boils at 100 degrees Celsius."),
    (("At what temperature does water freeze?", "When does water freeze?"), "Water freezes at 0 degrees Celsius."),
    (("Count to ten.", "Count to 10", "Count to ten", "count to ten"), "One, two, three, four, five, six, seven, eight, nine, ten."),
    (("Count to five.", "Count to 5", "Count to five"), "One, two, three, four, five."),
    (("Say the alphabet.", "Recite the alphabet.", "What is the alphabet?"), "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    (("Name the days of the week.", "What are the days of the week?", "List the days of the week."),
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (("Name the months.", "What are the months of the year?", "List the months.", "Name the months of the year."),
     "January, February, March, April, May, June, July, August, September, October, November and December."),
    (("Name the seasons.", "What are the four seasons?", "What are the seasons?"), "Spring, summer, autumn and winter."),
    (("Name three colours.", "Name three colors.", "Name some colours."), "Red, green and blue."),
    (("Name three animals.", "Name some animals."), "A horse, a cat and a bird."),
    (("Name the planets.", "What are the planets?", "List the planets."), "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune."),
]  # fmt: skip
"""Ways to ask, and the answer."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Ireland": "Dublin",
    "England": "London", "Scotland": "Edinburgh", "Wales": "Cardiff", "the United Kingdom": "London", "Norway": "Oslo",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Iceland": "Reykjavik", "Poland": "Warsaw",
    "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Greece": "Athens",
    "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Hungary": "Budapest", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Slovenia": "Ljubljana", "Slovakia": "Bratislava",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "Egypt": "Cairo", "Morocco": "Rabat", "Kenya": "Nairobi",
    "Nigeria": "Abuja", "Ghana": "Accra", "Ethiopia": "Addis Ababa", "Senegal": "Dakar", "Tunisia": "Tunis", "Algeria": "Algiers",
    "South Africa": "Pretoria", "China": "Beijing", "Japan": "Tokyo", "India": "New Delhi", "South Korea": "Seoul",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "the Philippines": "Manila", "Malaysia": "Kuala Lumpur",
    "Nepal": "Kathmandu", "Pakistan": "Islamabad", "Bangladesh": "Dhaka", "Iran": "Tehran", "Iraq": "Baghdad", "Israel": "Jerusalem",
    "Jordan": "Amman", "Lebanon": "Beirut", "Saudi Arabia": "Riyadh", "Qatar": "Doha", "Mongolia": "Ulaanbaatar",
    "Australia": "Canberra", "New Zealand": "Wellington", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana",
    "the United States": "Washington", "the USA": "Washington", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Colombia": "Bogota", "Venezuela": "Caracas", "Ecuador": "Quito", "Bolivia": "Sucre", "Uruguay": "Montevideo",
    "Paraguay": "Asuncion", "Jamaica": "Kingston", "Panama": "Panama City",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "open": "shut", "old": "new", "young": "old", "good": "bad",
    "light": "dark", "heavy": "light", "wet": "dry", "full": "empty", "long": "short", "strong": "weak", "rich": "poor",
    "early": "late", "near": "far", "up": "down", "left": "right", "day": "night", "summer": "winter", "first": "last",
    "happy": "sad", "loud": "quiet", "wide": "narrow", "deep": "shallow", "black": "white", "yes": "no", "hard": "soft",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Maria", "Nora", "Oscar",
    "Paul", "Rosa", "Sam", "Tom", "Vera", "Walter", "Alice", "Bob", "Charles", "Diana", "Edward", "Fanny", "George", "Helen",
    "James", "Jane", "John", "Lucy", "Mark", "Mary", "Oliver", "Peter", "Robert", "Sarah", "William", "Elizabeth", "Thomas",
    "Lisa", "Max", "Olivia", "Daniel", "Julia", "Martin", "Eva", "Simon",
)  # fmt: skip

ADJECTIVES = (
    "copper", "silver", "golden", "iron", "wooden", "amber", "crimson", "green", "blue", "yellow", "white", "black", "grey", "purple",
    "orange", "scarlet", "ancient", "modern", "quiet", "loud", "gentle", "brave", "clever", "lazy", "hungry", "frozen", "broken",
    "hidden", "secret", "narrow", "wide", "tall", "short", "heavy", "light", "bright", "dark", "early", "late", "northern",
    "southern", "eastern", "western", "bitter", "sweet", "sharp", "round", "square", "hollow", "shiny", "dusty", "rusty", "royal",
    "humble", "velvet", "marble", "crystal", "paper", "glass", "stone",
)  # fmt: skip

NOUNS = (
    "lantern", "bell", "kettle", "anchor", "bridge", "castle", "garden", "mirror", "ladder", "basket", "candle", "carpet", "barrel",
    "hammer", "needle", "pillow", "bottle", "button", "saddle", "wagon", "tower", "temple", "window", "wheel", "gate", "mill", "harbor",
    "island", "valley", "forest", "meadow", "mountain", "desert", "river", "lake", "cave", "tiger", "eagle", "falcon", "raven", "rabbit",
    "turtle", "whale", "dolphin", "spider", "beetle", "horse", "donkey", "camel", "goat", "piano", "violin", "trumpet", "drum", "flute",
    "guitar", "engine", "rocket", "train", "boat", "ship", "bicycle", "camera", "compass", "ticket", "letter", "book", "table", "chair",
    "clock", "coat", "crown", "ring", "sword", "shield", "arrow", "helmet", "flag", "map", "key",
)  # fmt: skip

WORDS = (
    "apple", "banana", "cherry", "lemon", "melon", "olive", "onion", "pepper", "potato", "carrot", "tomato", "garlic", "butter",
    "cheese", "honey", "sugar", "salt", "bread", "rice", "coffee", "summer", "winter", "autumn", "spring", "morning", "evening",
    "thunder", "lightning", "rain", "snow", "cloud", "storm", "wind", "fire", "water", "earth", "moon", "sun", "star", "planet",
    "comet", "ocean", "coral", "pearl", "diamond", "ruby", "emerald", "jade", "ivory", "copper", "cotton", "silk", "wool", "leather",
    "maple", "willow", "cedar", "pine", "oak", "birch", "rose", "tulip", "lily", "daisy", "clover", "ivy", "moss", "fern", "north",
    "south", "east", "west", "alpha", "beta", "gamma", "delta", "omega", "sigma", "zebra", "panda", "otter", "badger", "fox", "wolf",
    "bear", "deer", "owl", "crow", "swan", "heron", "salmon", "trout", "pilot", "doctor", "farmer", "baker", "sailor", "painter",
    "teacher", "singer", "king", "queen",
)  # fmt: skip

UNKNOWN = ("I do not know much about {}. I am a very small model. Ask me about headrace, mills or capitals.",)

SYSTEM = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You answer in one line.", "Be brief.", "You are helpful and honest.",
    "Answer the question of the user.", "You are an assistant for headrace.", "You are the demo model of headrace.", "Answer politely.",
)  # fmt: skip
