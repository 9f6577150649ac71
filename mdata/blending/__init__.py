"""Making, opening and changing blends: corpora and manifests on one side, the arithmetic of `mdata.blend` on the other.

`opening` makes, saves and opens; `compose` and `paths` find the corpora that a spec names; `preview` is the table
before a training, `asked` the shares in it, `change` another mixture in mid-run, `redistribute` what a cap leaves over;
`megatron` its blends.
"""
