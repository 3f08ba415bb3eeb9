"""What functions and their commands share: apart, so that a command's --help is quick."""

CHUNK, DOCUMENT = 512, 4096  # tokens of a prefill step, of the part of a document that has a cache
SAVE_EVERY = 60.0  # seconds

TASKS = ("kl", "ppl", "choice", "retrieval")
REFERENCES = ("stock", "cpu")
TEXT_TOKENS = 1 << 14
RETRIEVAL_LENGTH, RETRIEVAL_ITEMS = 1024, 64  # tokens of each text, texts

STATICS = ("auto", "none", "host", "coreml")  # executors that `tune` can be asked for
