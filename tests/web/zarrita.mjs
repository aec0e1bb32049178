// Reads arrays of a Zarr group by HTTP with zarrita, and writes their elements to stdout, one array after the other.
// node zarrita.mjs FOLDER_OF_NODE_MODULES URL PATH…
import { once } from "node:events";
import { pathToFileURL } from "node:url";

const [folder, url, ...paths] = process.argv.slice(2);
const zarr = await import(pathToFileURL(`${folder}/node_modules/zarrita/dist/src/index.js`));
const root = zarr.root(new zarr.FetchStore(url));
for (const path of paths) {
  const array = await zarr.open(root.resolve(path), { kind: "array" });
  // of an array without dims `get` returns the value
  const { data } = array.shape.length ? await zarr.get(array) : await array.getChunk([]);
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  if (!process.stdout.write(bytes)) await once(process.stdout, "drain");
}
