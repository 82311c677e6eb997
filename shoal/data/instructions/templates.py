"""Chat templates by name, for tokenizers without one or with another.

They have the turns and the special tokens of the models that they are named after, without tools, dates and thinking:
for these take the template that comes with the model's tokenizer. They refuse conversations with tools or tool calls.
"""

from __future__ import annotations

import json
from datetime import datetime

TEMPLATE_DATE = datetime(2024, 7, 26)
"""What templates get as today's date, so that a record gives the same tokens on every day and every machine. Templates
of Llama 3.2 write this one themselves where no clock is given."""
_DIRECTIVES = ("-d", "-m", *"aAbBcdfHIjmMpSUwWxXyYzZ")
"""What can follow % in the format of a date."""
_REFUSALS = """\
{%- if tools %}{{ raise_exception('NAME writes no tools') }}{% endif -%}
{%- for message in messages -%}
{%- if message['tool_calls'] %}{{ raise_exception('NAME writes no tool calls') }}{% endif -%}
{%- if message['content'] is not string %}{{ raise_exception('NAME writes texts alone') }}{% endif -%}
{%- endfor -%}
"""
"""The beginning of every template: what a template leaves out, a model would learn to leave out."""
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""
_GEMMA = """\
{{- bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'system' %}{{ raise_exception('gemma has no system turn; put its text into the first user turn') }}{% endif -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""  # noqa: E501
_MISTRAL = """\
{{- bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}{{ ' ' + message['content'] | trim + eos_token }}
{%- else %}{{ raise_exception('mistral has no ' + message['role'] + ' turn here; put its text into a user turn') }}
{%- endif -%}
{%- endfor -%}
"""
_ALPACA = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{ message['content'] + eos_token + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}
{%- else -%}{{ message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
"""
_TURNS = {"chatml": _CHATML, "llama3": _LLAMA3, "gemma": _GEMMA, "mistral": _MISTRAL, "alpaca": _ALPACA}
TEMPLATES = {name: _REFUSALS.replace("NAME", name) + turns for name, turns in _TURNS.items()}
"""The templates that `dataset.chat_template` can name."""


def with_fixed_date(template: str) -> str:
    """Returns a template whose `strftime_now` gives TEMPLATE_DATE and not the time of the clock.

    It is a macro, because transformers passes no functions to templates.
    """
    if "strftime_now" not in template:
        return template
    values = {f"%{directive}": TEMPLATE_DATE.strftime(f"%{directive}") for directive in _DIRECTIVES}
    filters = "".join(f" | replace({json.dumps(key)}, {json.dumps(value)})" for key, value in values.items())
    # Jinja removes the line break after a block, so that the template begins as it would alone.
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
