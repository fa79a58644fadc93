"""Twenty prompts of different kinds and lengths, for the greedy comparisons."""

from __future__ import annotations

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers and explain why they are prime.",
    "Translate 'good morning' into Spanish, Italian and German.",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the river,",
    "Explain photosynthesis to a child in two sentences.",
    "1, 1, 2, 3, 5, 8,",
    "Which is heavier, a kilogram of iron or a kilogram of feathers? Why?",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Summarise: The cat sat on the mat. The mat was red. The cat was black and very sleepy after a long day.",
    "SELECT name, count(*) FROM users GROUP BY",
    "Give me a recipe for pancakes with at most five ingredients.",
    "What happens when you mix baking soda and vinegar?",
    "Describe the difference between a list and a tuple in Python.",
    "Tell me a joke about computers.",
    "Names of the planets in order from the sun:",
    "Il était une fois une princesse qui",
    "How many minutes are there in a week? Show the calculation.",
    "A" * 40 + " is a long row of letters. What letter is it?",
)
