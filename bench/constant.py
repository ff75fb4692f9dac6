"""`python -m bench.constant PORT`: FastAPI on uvicorn that answers each GET with the text of its standard input."""

import sys

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response


def app(text: bytes) -> FastAPI:
    """Return the application."""
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @made.get("/{path:path}", response_model=None)
    async def answer(path: str) -> Response:
        return Response(text, media_type="application/json")

    return made


if __name__ == "__main__":
    settings = {"access_log": False, "log_level": "warning", "loop": "uvloop", "http": "httptools"}
    uvicorn.run(app(sys.stdin.buffer.read()), host="127.0.0.1", port=int(sys.argv[1]), **settings)  # type: ignore[arg-type]
