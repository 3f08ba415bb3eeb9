"""The errors that users can see: all are `MoEError`."""


class MoEError(Exception):
    """Base class of every error that mlx_moe raises on purpose."""


class InvalidArgument(MoEError, ValueError):
    """An argument's shape, dtype or value cannot be used."""


class NotContiguous(InvalidArgument):
    """An array's rows do not follow each other in memory; `mx.contiguous` mends that."""


class ModelNotFound(MoEError, FileNotFoundError):
    """There is no such model directory, or a file that it needs is not in it."""


class UnsupportedLayer(MoEError, TypeError):
    """A layer's format or activation is not implemented."""


class NoMoELayers(MoEError, ValueError):
    """The model has no layer of the kind that was to be replaced."""


class CorruptFile(MoEError, ValueError):
    """A file is not what it should be: another format, cut short, or values that cannot be."""


class IdentityMismatch(MoEError, ValueError):
    """A calibration, plan or artifact was made from another model."""


class CorruptArtifact(CorruptFile):
    """A compiled artifact is missing, cut short, changed or not finished."""


class MissingDependency(MoEError, ImportError):
    """A package that this needs is not installed, or not to be had for this Python."""


class DiskFull(MoEError, OSError):
    """There is not enough space left on the disk."""


class HubError(MoEError, OSError):
    """The Hugging Face hub refused, or could not be reached."""


class BadData(MoEError, ValueError):
    """A text that was given as data cannot be read; the message has its file and line."""


class ReadFailed(MoEError, OSError):
    """A weight file cannot be read: an I/O error, or fewer bytes than there should be."""


class FileChanged(MoEError, OSError):
    """A weight file was written to or replaced while it was in use."""


class StoreClosed(MoEError, RuntimeError):
    """The expert store was closed, or belongs to another process."""


class StoreBusy(MoEError, TimeoutError):
    """Other forwards held the slots that one needed for too long."""


class MemoryLimit(MoEError, ValueError):
    """The memory that experts may take is too little for what was asked."""


class ExpertsOnDisk(MoEError, RuntimeError):
    """Expert weights that stay on disk were needed in memory: to train, save, fuse or quantise."""


class RankLost(MoEError, ConnectionError):
    """Another process of the group ended, or cannot be reached."""


class RankMismatch(MoEError, ValueError):
    """The processes of a group differ in version, model, options or in what they compute."""
