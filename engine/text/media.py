"""media_problem: why images, sound and video in a request are rejected, by any API's name for such a part."""

from __future__ import annotations

from engine.errors import shown

__all__ = ["media_problem"]

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}


def media_problem(kind: object) -> str | None:
    """Return a sentence for the client about a part of the type ``kind``; None if it is not image, sound or video."""
    media = _MEDIA.get(kind) if isinstance(kind, str) else None
    if media is None:
        return None
    return f"content of type {shown(kind)} is not supported: models are served for text, without {media}; send text"
