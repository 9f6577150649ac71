"""What sample k looks like: the arrays that a model sees as one row.

`gpt` is concatenated text, cut into runs by the native order; `gpt_megatron` the same in Megatron's; `documents` one
document a row, `packed` whole documents fitted into rows, `chat` conversations. `fim` rearranges another kind's rows;
`bert` and `t5` mask sentences. `rows` is what rows of text share, `masked` what masked samples do. Nothing is imported
here: a dataset loads the kind that it has (mdata/kinds.py).
"""
