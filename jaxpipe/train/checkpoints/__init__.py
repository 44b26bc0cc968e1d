"""Write checkpoints and read them: one checkpoint's files, the directory of them, and several processes at both."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    contents="Manifest",
    folders="Intact StepName find load_group reading",
    leaves="Placement PyTree",
    which_model="Likeness likeness load_state model_digest stored_params",
)
