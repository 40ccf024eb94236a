"""Deploys what is promoted: a receiver of MLflow's webhook `model_version_alias.created`.

MlflowClient().create_webhook("deploy", "https://deploy.example.com/", ["model_version_alias.created"], secret=…)
SECRET=… NAME=classifier ALIAS=champion python deploy.py 8443 -- kubectl rollout restart deployment/classifier
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

MAX_BYTES, MAX_AGE_S = 1 << 16, 300


class Receiver(BaseHTTPRequestHandler):
    """Takes what MLflow has signed."""

    def do_POST(self) -> None:
        body = self.rfile.read(max(0, min(int(self.headers.get("Content-Length", 0)), MAX_BYTES)))
        stamp = self.headers.get("X-MLflow-Timestamp", "0")
        signed = f"{self.headers.get('X-MLflow-Delivery-Id')}.{stamp}.".encode() + body
        digest = hmac.new(os.environ["SECRET"].encode(), signed, hashlib.sha256).digest()
        expected = f"v1,{base64.b64encode(digest).decode()}"
        is_right = hmac.compare_digest(expected, self.headers.get("X-MLflow-Signature", ""))
        if not is_right or abs(time.time() - int(stamp)) > MAX_AGE_S:
            self.send_error(403)
            return
        model = json.loads(body)["data"]
        self.send_response(204)
        self.end_headers()
        if (model["name"], model["alias"]) == (os.environ["NAME"], os.environ["ALIAS"]):
            subprocess.run(
                sys.argv[3:], env={**os.environ, "MODEL": f"models:/{model['name']}/{model['version']}"}, check=False
            )


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
