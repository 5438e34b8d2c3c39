// Runs a bundle's ONNX file in Node.js:
//
//     npm install --prefix examples/serving --ignore-scripts
//     node examples/serving/onnx_runtime.mjs examples/build/minilm
//
// The package's install scripts only fetch libraries for GPUs. This example runs every stored case of the bundle and
// prints the distance of each answer from the original's.

import fs from "node:fs";
import path from "node:path";
import process from "node:process";

import { InferenceSession, Tensor } from "onnxruntime-node";

// ONNX Runtime's name and the array type of each safetensors dtype.
const TYPES = {
  F32: ["float32", Float32Array],
  F64: ["float64", Float64Array],
  F16: ["float16", Uint16Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  I16: ["int16", Int16Array],
  I8: ["int8", Int8Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};

/** Returns the tensors of a safetensors file by name. The file holds the header's length, a JSON header, and values. */
function readTensors(file) {
  const bytes = fs.readFileSync(file);
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const tensors = {};
  for (const [name, entry] of Object.entries(JSON.parse(bytes.toString("utf8", 8, start)))) {
    if (name === "__metadata__") continue;
    if (!(entry.dtype in TYPES)) throw new Error(`${name}: this example cannot read ${entry.dtype}`);
    const [type, Values] = TYPES[entry.dtype];
    const [from, to] = entry.data_offsets;
    const copied = new Uint8Array(bytes.subarray(start + from, start + to)); // copied, because wider arrays need alignment
    tensors[name] = new Tensor(type, new Values(copied.buffer), entry.shape);
  }
  return tensors;
}

/** Returns the float16 number of 16 bits, because not every Node.js has Float16Array. */
function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const finite = exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction;
  const size = exponent < 31 ? finite : fraction ? NaN : Infinity;
  return bits >> 15 ? -size : size;
}

function numbers(tensor) {
  return Array.from(tensor.data, tensor.type === "float16" && tensor.data instanceof Uint16Array ? half : Number);
}

function distance(answer, expected) {
  const [actual, reference] = [numbers(answer), numbers(expected)];
  let largest = 0;
  for (let i = 0; i < reference.length; i++) largest = Math.max(largest, Math.abs(actual[i] - reference[i]));
  return largest;
}

const bundle = process.argv[2];
const manifest = JSON.parse(fs.readFileSync(path.join(bundle, "manifest.json"), "utf8"));
const stored = readTensors(path.join(bundle, "reference.safetensors"));
const artifact = manifest.artifacts.find((each) => each.format === "onnx");
const session = await InferenceSession.create(path.join(bundle, artifact.path));
for (const [number, name] of manifest.reference_cases.entries()) {
  const inputs = Object.fromEntries(session.inputNames.map((input) => [input, stored[`${number}.inputs.${input}`]]));
  const answers = await session.run(inputs);
  for (const output of manifest.outputs) {
    const answer = answers[output.name];
    const error = distance(answer, stored[`${number}.outputs.${output.name}`]).toPrecision(2);
    console.log(`${name}: ${output.name} [${answer.dims.join(", ")}]: ${error} from the original`);
  }
}
