"""ChatML, the chat form of the Qwen families, for checkpoints that bring no template of their own."""

from __future__ import annotations

from freetoken.vocab.chat import ChatFormat

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PLAIN = ChatFormat(fallback_template=TEMPLATE)
THINKING = ChatFormat(fallback_template=TEMPLATE, reasoning_start="<think>", reasoning_end="</think>")
