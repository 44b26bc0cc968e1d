"""Chat templates in the manner of models of the hub, and chats made at random, harmless and hostile."""

from __future__ import annotations

import random
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = """{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}
{%- for t in tools %}{{- t | tojson + '\n' }}{% endfor %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    + CHATML,
    "llama 3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "generation blocks": "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}",
    "thinking stripped": THINKING,
    "think prompt": "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}</s>"
    "{% else %}<U>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}",
    "tools": "{% if tools is not none %}<tools>{{ tools | tojson(indent=1) }}</tools>{% endif %}"
    "{% if documents is not none %}<documents>{{ documents | tojson }}{% endif %}" + CHATML,
    "strftime_now": "{{ 'Today is ' + strftime_now('%d %B %Y') + '\n' }}" + CHATML,
    "guarded date": "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul 2024{% endif %}" + CHATML,
    "ends but the last": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last or m.role != 'assistant' %}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HOSTILE = (
    "\ufdd0", "\ufdd1", "\ue000", "\ue001", "700000000", "7", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>",
    "<A>", "<U>", "{{ 7 * 7 }}", "{% generation %}", "[INST]", "assistant: ", "\n", " ", "\x00", "\u2028", "🦀", "user: ",
)  # fmt: skip


def chat(rng: random.Random, turns: int, hostile: bool, *, words: int = 6) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages, and the contents of the answers among them. Contents are all different, and none is a part of
    another."""
    answers: list[str] = []
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief §0§"}] if rng.random() < 0.3 else []
    for turn in range(turns):
        for role in ("user", "assistant"):
            parts = [rng.choice(("yes", "why", "süß", "12", "the cat sat")) for _ in range(rng.randint(1, words))]
            if hostile:
                parts += rng.choices(HOSTILE, k=rng.randint(1, 4))
                rng.shuffle(parts)
            content = f"«{role[0]}{turn}. {' '.join(parts)} .{turn}{role[0]}»"
            if role == "assistant":
                answers.append(content)
            messages.append({"role": role, "content": content})
    return messages, answers
